package weightcache

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/weightcache/source"
)

// throttles holds back all requests to a source that asked for a pause, so
// that one 429 is not followed by one of every other stream. The zero value is
// ready.
type throttles struct {
	mu    sync.Mutex
	until map[string]time.Time // by source name; as many as there are sources
}

// note keeps the pause that a failed call asked for, at most maxRetryAfter.
func (t *throttles) note(err error) {
	said, ok := errors.AsType[*source.Error](err)
	if !ok || said.RetryAfter <= 0 {
		return
	}
	until := time.Now().Add(min(said.RetryAfter, maxRetryAfter))
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.until == nil {
		t.until = map[string]time.Time{}
	}
	if until.After(t.until[said.Source]) {
		t.until[said.Source] = until
	}
}

// left is how long the source is not to be asked, 0 or less where it may be.
func (t *throttles) left(name string) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return time.Until(t.until[name])
}

// wait returns once the source may be asked, or with the context's cause.
func (t *throttles) wait(ctx context.Context, name string) error { return t.waitAside(ctx, name, nil) }

// waitAside is wait for the holder of a permit, which others have meanwhile.
func (t *throttles) waitAside(ctx context.Context, name string, held *permit) error {
	for {
		left := t.left(name)
		if left <= 0 {
			return nil
		}
		if err := held.sleep(ctx, left); err != nil {
			return err
		}
	}
}
