// Command torture ends the real agent at random moments, again and again, and
// holds what it then says, serves and keeps against what it had acknowledged.
// `make torture` runs it. It works on a directory of its own against an origin
// of its own, and ends only processes that it started.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
)

func main() {
	o := options{out: os.Stdout, memory: 150 << 20}
	agent := flag.String("agent", "bin/hearth-agent", "the agent's `program`")
	hearth := flag.String("hearth", "bin/hearth", "the command line's `program`")
	flag.IntVar(&o.rounds, "rounds", 100, "how many rounds")
	kvRounds := flag.Int("kv", 20, "how many rounds of them with the KV store, after those")
	flag.Uint64Var(&o.seed, "seed", 0, "what the dice begin with; 0 takes one at random")
	flag.StringVar(&o.dir, "dir", "", "an empty `folder` to work in; a temporary one if empty")
	flag.Parse()
	os.Exit(carry(o, *kvRounds, *agent, *hearth))
}

// carry runs the torture and gives the exit status.
func carry(o options, kvRounds int, agent, hearth string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if o.program, err = filepath.Abs(agent); err == nil {
		o.hearth, err = filepath.Abs(hearth)
	}
	if o.seed == 0 {
		o.seed = rand.Uint64() >> 32
	}
	own := o.dir == ""
	if own && err == nil {
		o.dir, err = os.MkdirTemp("", "hearth-torture-")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "torture:", err)
		return 1
	}
	fmt.Printf("seed %d, %d rounds and %d with the KV store in %s\n", o.seed, o.rounds, kvRounds, o.dir)
	summary, err := run(ctx, o)
	tell(summary)
	done := summary.Rounds
	if err == nil {
		kv := o
		kv.rounds, kv.dir = kvRounds, filepath.Join(o.dir, "with-kv")
		if err = os.Mkdir(kv.dir, 0o700); err == nil {
			var told KVSummary
			told, err = runKV(ctx, kv)
			tell(told)
			done = told.Rounds
		}
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "torture: %v\nEverything is kept in %s.\nAgain: make torture SEED=%d ROUNDS=%d\n", err, o.dir, o.seed, done+1)
		return 1
	}
	if own {
		_ = os.RemoveAll(o.dir)
	}
	return 0
}

// tell prints what a run did.
func tell(summary any) {
	text, _ := json.Marshal(summary)
	fmt.Println(string(text))
}
