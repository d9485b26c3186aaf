package main

import (
	"errors"
	"flag"
	"slices"
	"testing"
)

func TestWhatFollowsKubectlIsKubectls(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ args, own, rest []string }{
		{[]string{"get", "pods"}, nil, []string{"get", "pods"}},
		{[]string{"-n", "x", "get", "pods"}, nil, []string{"-n", "x", "get", "pods"}},
		{[]string{"--name", "other", "-n", "x", "get", "pods"}, []string{"--name", "other"}, []string{"-n", "x", "get", "pods"}},
		{[]string{"-name=other", "get", "pods", "--name", "x"}, []string{"-name=other"}, []string{"get", "pods", "--name", "x"}},
		{[]string{"--", "--name", "x"}, nil, []string{"--name", "x"}},
		{[]string{"exec", "p", "--", "ls", "-l"}, nil, []string{"exec", "p", "--", "ls", "-l"}},
		{[]string{"--help"}, nil, []string{"--help"}},
		{nil, nil, nil},
	} {
		if own, rest := ownArgs(c.args); !slices.Equal(own, c.own) || !slices.Equal(rest, c.rest) {
			t.Errorf("%q is parted into %q and %q", c.args, own, rest)
		}
	}
	// It comes as far as to look for the lab, whatever kubectl is told.
	for _, args := range [][]string{{"-n", "x", "get", "pods"}, {"--help"}, {"-h"}} {
		err := run(t.Context(), append([]string{"kubectl", "--name", "there-is-none"}, args...))
		if err == nil || errors.Is(err, errUsage) || errors.Is(err, flag.ErrHelp) {
			t.Errorf("kubelab kubectl %q ended with %v", args, err)
		}
	}
}
