package terminal

import (
	"context"
	"errors"
	"fmt"
	"io"
)

// Code is a process exit status.
type Code int

// The exit statuses of every command. ExitCodesText explains them to people.
const (
	ExitOK          Code = 0
	ExitFailure     Code = 1
	ExitUsage       Code = 2
	ExitNotFound    Code = 3
	ExitRefused     Code = 4
	ExitUnreachable Code = 5
	ExitInterrupted Code = 130
)

// ExitCodesText is the help topic about exit statuses.
const ExitCodesText = `Every hearth command ends with one of these exit statuses:

    0  done
    1  failed: the work itself went wrong, or the configuration is invalid
    2  usage: an unknown command or flag, or an argument that cannot be read
    3  not found: the named artifact, node, device, file or model does not exist
    4  refused: not allowed by configuration, or in use
    5  unreachable: the agent or router did not answer at its address
  130  interrupted by Ctrl-C or SIGTERM before the work was done

A running agent or router that is told to stop and stops cleanly ends with 0.
Answers go to standard output; everything else goes to standard error.`

// Error is an error with an exit status and, where one helps, a hint that says
// what the person at the keyboard can do.
type Error struct {
	Code Code
	Err  error
	Hint string
}

// Error gives the message without the hint.
func (e *Error) Error() string { return e.Err.Error() }

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// Fail gives err an exit status and a hint (may be empty); nil stays nil.
func Fail(code Code, err error, hint string) error {
	if err == nil {
		return nil
	}
	return &Error{Code: code, Err: err, Hint: hint}
}

// Usagef gives a usage error.
func Usagef(format string, args ...any) error {
	return &Error{Code: ExitUsage, Err: fmt.Errorf(format, args...)}
}

// CodeOf gives the exit status that err ends the process with.
func CodeOf(err error) Code {
	if err == nil {
		return ExitOK
	}
	if stated, ok := errors.AsType[*Error](err); ok {
		return stated.Code
	}
	if errors.Is(err, context.Canceled) {
		return ExitInterrupted
	}
	return ExitFailure
}

// Report writes err and its hint to w for a person. An error without a text,
// whose command has said everything already, writes nothing.
func Report(w io.Writer, err error) {
	if err == nil || err.Error() == "" {
		return
	}
	label, end := "", ""
	if Colour(w) {
		label, end = "\x1b[31m", "\x1b[0m"
	}
	fmt.Fprintf(w, "%shearth: %v%s\n", label, err, end)
	if stated, ok := errors.AsType[*Error](err); ok && stated.Hint != "" {
		fmt.Fprintf(w, "hint: %s\n", stated.Hint)
	}
}
