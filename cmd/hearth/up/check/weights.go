package check

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/hearth-dev/hearth/cmd/hearth/up/fabric"
	"github.com/hearth-dev/hearth/test/sim/engine"
	"github.com/hearth-dev/hearth/units"
)

// readyLimit bounds every wait for something to get ready. It is generous,
// since a check says nothing about speed.
const readyLimit = 2 * time.Minute

// coldPull brings up everything from nothing and asks one question.
func (s *scenario) coldPull(ctx context.Context, figures map[string]any) error {
	if err := s.startNodes(ctx); err != nil {
		return err
	}
	if err := s.pull(ctx, ref); err != nil {
		return err
	}
	if err := s.startEngines(ctx); err != nil {
		return err
	}
	if err := s.f.StartRouter(ctx, s.f.Router); err != nil {
		return err
	}
	if err := s.ask(ctx); err != nil {
		return err
	}
	size, err := s.artifactSize(ctx, ref)
	if err != nil {
		return err
	}
	figures["artifactBytes"], figures["originBytes"], figures["nodes"] = size, s.f.Origin.Bytes(), nodes
	if s.f.Origin.Bytes() < nodes*size {
		return fmt.Errorf("origin counted %d bytes for %d cold nodes and an artifact of %d", s.f.Origin.Bytes(), nodes, size)
	}
	return nil
}

// warmStart restarts agents and engines and expects no byte from the origin.
func (s *scenario) warmStart(ctx context.Context, figures map[string]any) error {
	for _, e := range s.f.Engines {
		e.Stop()
	}
	for _, n := range s.f.Nodes {
		n.Stop()
	}
	before := s.f.Origin.Bytes()
	if err := s.startNodes(ctx); err != nil {
		return err
	}
	if err := s.pull(ctx, ref); err != nil {
		return err
	}
	if err := s.startEngines(ctx); err != nil {
		return err
	}
	if err := s.ask(ctx); err != nil {
		return err
	}
	figures["originBytes"] = s.f.Origin.Bytes() - before
	if n := s.f.Origin.Bytes() - before; n != 0 {
		return fmt.Errorf("origin counted %d bytes for a warm start, want none", n)
	}
	return nil
}

func (s *scenario) startNodes(ctx context.Context) error {
	var g errgroup.Group
	for _, n := range s.f.Nodes {
		g.Go(func() error { return s.f.StartNode(ctx, n) })
	}
	return g.Wait()
}

func (s *scenario) startEngines(ctx context.Context) error {
	var g errgroup.Group
	for _, e := range s.f.Engines {
		g.Go(func() error { return s.f.StartEngine(ctx, e) })
	}
	return g.Wait()
}

// pull makes an artifact ready on every node.
func (s *scenario) pull(ctx context.Context, ref string) error {
	ctx, cancel := context.WithTimeout(ctx, readyLimit)
	defer cancel()
	var g errgroup.Group
	for _, n := range s.f.Nodes {
		g.Go(func() error { return n.Pull(ctx, ref, nil) })
	}
	return g.Wait()
}

// ask sends one short request through the router, waiting until it sees every
// engine.
func (s *scenario) ask(ctx context.Context) error {
	if err := s.f.AwaitEndpoints(ctx, s.f.Router); err != nil {
		return err
	}
	answer, err := s.client.chat(ctx, chatRequest{
		Model: served, Messages: []message{{"user", "Are you there?"}}, MaxTokens: 8, Stream: true,
	}, nil)
	if err != nil {
		return err
	}
	if answer.Text == "" || answer.Tokens == 0 {
		return errors.New("the answer is empty")
	}
	return nil
}

func (s *scenario) artifactSize(ctx context.Context, ref string) (int64, error) {
	a, err := s.f.Nodes[0].Artifact(ctx, ref)
	return a.Size, err
}

// agentKilled kills an agent in the middle of a pull and counts what the
// origin sends twice.
func (s *scenario) agentKilled(ctx context.Context, figures map[string]any) error {
	node, origin := s.f.Nodes[1], s.f.Origin
	origin.SetRate(32 << 20)
	before := origin.Bytes()
	pullCtx, stop := context.WithCancel(ctx)
	defer stop()
	pulled := make(chan error, 1)
	go func() { pulled <- node.Pull(pullCtx, secondRef, nil) }()
	err := poll(ctx, readyLimit, "half of the pull", func(context.Context) (bool, error) {
		return origin.Bytes()-before > int64(secondSize)/2, nil
	})
	node.Kill()
	stop()
	interrupted := <-pulled
	origin.SetRate(0)
	if err != nil {
		return err
	}
	atKill := origin.Bytes() - before
	if err := s.f.StartNode(ctx, node); err != nil {
		return err
	}
	if err := node.Pull(ctx, secondRef, nil); err != nil {
		return err
	}
	a, err := node.Artifact(ctx, secondRef)
	if err != nil {
		return err
	}
	total := origin.Bytes() - before
	again := total - a.Size
	allowed := int64(streams) * int64(segmentSize)
	figures["artifactBytes"], figures["bytesAtKill"], figures["originBytes"] = a.Size, atKill, total
	figures["fetchedAgain"], figures["allowed"] = again, allowed
	if interrupted == nil || atKill >= a.Size {
		return errors.New("the pull was over before the agent was killed")
	}
	if again > allowed {
		return fmt.Errorf("origin sent %d bytes again, want at most one segment for each of %d streams, %d bytes", again, streams, allowed)
	}
	return s.awaitAll(ctx)
}

// awaitAll waits until the router sees every engine again.
func (s *scenario) awaitAll(ctx context.Context) error { return s.f.AwaitEndpoints(ctx, s.f.Router) }

// flippedByte damages one file of the store and expects that it is found,
// refused and mended by fetching that file alone.
func (s *scenario) flippedByte(ctx context.Context, figures map[string]any) error {
	node, origin := s.f.Nodes[0], s.f.Origin
	v, err := node.View(ctx, ref)
	if err != nil {
		return err
	}
	shards, err := filepath.Glob(filepath.Join(v.Dir, "*.safetensors"))
	if err != nil || len(shards) == 0 {
		return fmt.Errorf("find a shard in %s: %w", v.Dir, errors.Join(err, os.ErrNotExist))
	}
	shard := shards[0]
	info, err := os.Stat(shard)
	if err != nil {
		return fmt.Errorf("look at shard: %w", err)
	}
	if err := flip(shard, info); err != nil {
		return err
	}
	// An engine that starts now must not run on these bytes.
	if _, err := engine.LoadWeights(ctx, v.Dir, v.Digest); err == nil {
		return errors.New("an engine loaded the damaged file")
	}
	name := repo + "/" + filepath.Base(shard)
	all, one := origin.Bytes(), origin.FileBytes(name)
	origin.SetRate(units.Rate(info.Size())) // the mending takes about a second
	bad, err := node.Verify(ctx, ref)
	if err != nil {
		return err
	}
	figures["found"] = bad
	if len(bad) != 1 || !strings.HasSuffix(bad[0], filepath.Base(shard)) {
		return fmt.Errorf("verify found %q damaged, want %s alone", bad, filepath.Base(shard))
	}
	if now, err := os.Stat(shard); err == nil && os.SameFile(info, now) {
		return errors.New("the damaged file is still where engines read")
	}
	a, err := node.Artifact(ctx, ref)
	if err != nil {
		return err
	}
	figures["stateWhenFound"] = a.State
	if a.State == fabric.Ready {
		return errors.New("the artifact is still called ready after its damage was found")
	}
	err = poll(ctx, readyLimit, "the mended artifact", func(ctx context.Context) (bool, error) {
		a, err := node.Artifact(ctx, ref)
		return a.State == fabric.Ready, err
	})
	origin.SetRate(0)
	if err != nil {
		return err
	}
	mended, err := node.View(ctx, ref)
	if err != nil {
		return err
	}
	if _, err := engine.LoadWeights(ctx, mended.Dir, v.Digest); err != nil {
		return fmt.Errorf("load mended weights: %w", err)
	}
	again, others := origin.FileBytes(name)-one, origin.Bytes()-all
	figures["fileBytes"], figures["fetchedAgain"], figures["othersFetchedAgain"] = info.Size(), again, others-again
	if again != info.Size() || others != again {
		return fmt.Errorf("origin sent %d bytes of the file of %d, and %d of others", again, info.Size(), others-again)
	}
	return nil
}

// flip inverts one bit in the middle of a file, whatever its mode, and leaves
// its times alone, as a drive that loses a bit does.
func flip(path string, info os.FileInfo) error {
	if err := os.Chmod(path, 0o600); err != nil {
		return fmt.Errorf("flip a byte: %w", err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("flip a byte: %w", err)
	}
	one := make([]byte, 1)
	at := info.Size() / 2
	_, err = f.ReadAt(one, at)
	if err == nil {
		_, err = f.WriteAt([]byte{one[0] ^ 1}, at)
	}
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("flip a byte: %w", err)
	}
	if err := errors.Join(os.Chtimes(path, info.ModTime(), info.ModTime()), os.Chmod(path, info.Mode().Perm())); err != nil {
		return fmt.Errorf("flip a byte: %w", err)
	}
	return nil
}
