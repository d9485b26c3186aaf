package kvload

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
)

// Tenant is how to reach one tenant of an agent, and what is known of its values.
type Tenant struct {
	Name, Network, Addr, Password string
	Oracle                        *Oracle
	Keys                          int
	// What was done, of all lives.
	Sets, Gets, Hits, Deletes atomic.Int64
}

// Dial connects to the tenant.
func (t *Tenant) Dial(ctx context.Context, hello bool) (*Client, error) {
	return Dial(ctx, t.Network, t.Addr, t.Password, hello)
}

// Get reads a key and judges it; found is false for a miss.
func (t *Tenant) Get(c *Client, key int) (found bool, err error) {
	judge := t.Oracle.read(key)
	r, err := c.Do("GET", Name(key))
	if err != nil {
		return false, err
	}
	t.Gets.Add(1)
	if r.Nil {
		return false, nil
	}
	t.Hits.Add(1)
	if err := judge(r.Value); err != nil {
		return true, fmt.Errorf("%w: tenant %s: %w", ErrWrong, t.Name, err)
	}
	return true, nil
}

// ErrWrong wraps what may never be answered.
var ErrWrong = errors.New("a wrong value")

// Set stores a new version of a key.
func (t *Tenant) Set(c *Client, key int) error {
	version, done := t.Oracle.change(key, true)
	r, err := c.Do("SET", Name(key), string(Value(key, version)))
	if err != nil {
		return err
	}
	if r.Text != "OK" {
		return fmt.Errorf("%w: SET is answered %q", ErrWrong, r.Text)
	}
	done()
	t.Sets.Add(1)
	return nil
}

// Delete ends a key.
func (t *Tenant) Delete(c *Client, key int) error {
	_, done := t.Oracle.change(key, false)
	if _, err := c.Do("DEL", Name(key)); err != nil {
		return err
	}
	done()
	t.Deletes.Add(1)
	return nil
}

// Work does something by chance; what a native client does not send only where
// hello says that it is none.
func (t *Tenant) Work(c *Client, dice *rand.Rand, hello bool) error {
	key := dice.IntN(t.Keys)
	switch n := dice.IntN(100); {
	case n < 40:
		return t.Set(c, key)
	case n < 46:
		return t.Delete(c, key)
	case n < 55:
		if _, err := c.Do("EXISTS", Name(key)); err != nil {
			return err
		}
	case n < 60 && hello:
		return t.many(c, dice)
	}
	_, err := t.Get(c, key)
	return err
}

// many reads several keys at once.
func (t *Tenant) many(c *Client, dice *rand.Rand) error {
	args := []string{"MGET"}
	var judges []func([]byte) error
	for range 1 + dice.IntN(5) {
		key := dice.IntN(t.Keys)
		args, judges = append(args, Name(key)), append(judges, t.Oracle.read(key))
	}
	r, err := c.Do(args...)
	if err != nil {
		return err
	}
	if len(r.List) != len(judges) {
		return fmt.Errorf("%w: MGET of %d keys gives %s", ErrWrong, len(judges), strconv.Itoa(len(r.List)))
	}
	for i, one := range r.List {
		if one.Nil {
			continue
		}
		if err := judges[i](one.Value); err != nil {
			return fmt.Errorf("%w: tenant %s: %w", ErrWrong, t.Name, err)
		}
	}
	return nil
}
