package resp

import (
	"bytes"
	"errors"
	"os"

	"github.com/hearth-dev/hearth/kvtier/block"
)

const (
	// fillAtOnce is how much of a value is received before it is hashed, so that
	// it is in the processor's cache still. A value that is hashed at once costs
	// half.
	fillAtOnce = 1 << 20
	// receiveAtOnce is how much is awaited at once, and how much has to come
	// within a time.
	receiveAtOnce = 256 << 10
)

// key names a value within the tenant's namespace.
func (c *conn) key(name []byte) block.Key {
	return block.Key{Hash: block.HashOf(name), Group: c.database}
}

// model gives the figures of a key's model.
func (c *conn) model(info *keyInfo) *model {
	if c.lastModel == nil || !bytes.Equal(info.model, c.lastModelName) {
		c.lastModel = c.tenant.models.of(info.model)
		c.lastModelName = append(c.lastModelName[:0], info.model[:min(len(info.model), maxModelName+1)]...)
	}
	return c.lastModel
}

// awaited is the size that a native client has a buffer for.
func (c *conn) awaited(f family) (int, bool) {
	if size, ok := c.sizes.get(f); ok {
		return size, true
	}
	return c.tenant.sizes.get(f)
}

func (c *conn) get(args [][]byte) error {
	found, err := c.fetch(args[1])
	if err != nil || found {
		return err
	}
	if !c.native {
		c.null()
		return nil
	}
	info := parseKey(args[1])
	if size, ok := c.awaited(info.family()); ok {
		c.tenant.figures.padded.Add(1)
		c.paddedNull(size)
	} else {
		c.tenant.figures.unpadded.Add(1)
		c.null()
	}
	return nil
}

// fetch answers with a value, or says that there is none.
func (c *conn) fetch(name []byte) (bool, error) {
	info, key := parseKey(name), c.key(name)
	figures, of := &c.tenant.figures, c.model(&info)
	got, err := c.tenant.blocks.Get(c.listening.ctx, key)
	if c.native {
		c.tenant.pins.got(key, c.id)
	}
	if err != nil {
		figures.misses.Add(1)
		of.misses.Add(1)
		return false, nil //nolint:nilerr // whatever went wrong below, a cache just has not got it
	}
	value := got.Bytes()
	if c.native && !c.fits(info.family(), len(value)) {
		got.Release()
		figures.misses.Add(1)
		of.misses.Add(1)
		return false, nil
	}
	figures.hits.Add(1)
	figures.bytesOut.Add(uint64(len(value)))
	of.hit(got)
	return true, c.value(value, got)
}

// fits says whether a native client has a buffer for a value, and learns of it
// where nothing was known.
func (c *conn) fits(f family, size int) bool {
	awaited, known := c.awaited(f)
	if known && awaited != size {
		c.tenant.figures.mismatched.Add(1)
		return false
	}
	if !known {
		c.tenant.sizes.learn(f, size, false)
	}
	return true
}

func (c *conn) mget(args [][]byte) error {
	names := args[1:]
	c.header('*', int64(len(names)))
	for _, name := range names {
		found, err := c.fetch(name)
		if err != nil {
			return err
		}
		if !found {
			c.null()
		}
	}
	return nil
}

func (c *conn) exists(args [][]byte) error {
	count := int64(0)
	for _, name := range args[1:] {
		if c.has(name) {
			count++
		}
	}
	c.integer(count)
	return nil
}

// has says whether a value is there. To a native client it is a promise.
func (c *conn) has(name []byte) bool {
	info, key := parseKey(name), c.key(name)
	f := info.family()
	c.order.ask(f, key)
	size, ok := c.tenant.blocks.Lookup(key)
	if ok && c.native {
		ok = c.fits(f, size) && c.promise(&info, key, size)
	}
	if ok {
		c.tenant.figures.found.Add(1)
	} else {
		c.tenant.figures.absent.Add(1)
	}
	return ok
}

// promise pins a block for the GET that follows.
func (c *conn) promise(info *keyInfo, key block.Key, size int) bool {
	if info.form == formOther {
		return true
	}
	pin, ok := c.tenant.blocks.Pin(key)
	if !ok {
		return false
	}
	if pin.Size() != size {
		pin.Release()
		return false
	}
	if c.tenant.pins.add(key, pin, c.id) {
		return true
	}
	// The multiprocess server can bear a miss after all; the client within the engine cannot.
	if info.form == formInProcess {
		return false
	}
	c.tenant.figures.unpinned.Add(1)
	return true
}

func (c *conn) del(args [][]byte) error {
	keys := make([]block.Key, 0, len(args)-1)
	for _, name := range args[1:] {
		key := c.key(name)
		c.tenant.pins.drop(key)
		keys = append(keys, key)
	}
	removed, err := c.tenant.blocks.Delete(c.listening.ctx, keys...)
	c.tenant.figures.deleted.Add(uint64(max(removed, 0)))
	if err != nil && !c.native {
		c.error("ERR deleting failed")
		return nil
	}
	c.integer(int64(removed))
	return nil
}

func (c *conn) strlen(args [][]byte) error {
	size, _ := c.tenant.blocks.Lookup(c.key(args[1]))
	c.integer(int64(size))
	return nil
}

func (c *conn) ttl(args [][]byte) error {
	if _, ok := c.tenant.blocks.Lookup(c.key(args[1])); ok {
		c.integer(-1)
	} else {
		c.integer(-2)
	}
	return nil
}

// expire is taken and does nothing: no clock decides what stays.
func (c *conn) expire(args [][]byte) error {
	if _, ok := parseInt(args[2]); !ok {
		c.error("ERR value is not an integer or out of range")
		return nil
	}
	if _, ok := c.tenant.blocks.Lookup(c.key(args[1])); ok {
		c.integer(1)
	} else {
		c.integer(0)
	}
	return nil
}

func (c *conn) kind(args [][]byte) error {
	if _, ok := c.tenant.blocks.Lookup(c.key(args[1])); ok {
		c.simple("string")
	} else {
		c.simple("none")
	}
	return nil
}

func (c *conn) dbsize([][]byte) error {
	if c.tenant.options.Count == nil {
		c.error("ERR the number of values is not known")
		return nil
	}
	c.integer(c.tenant.options.Count())
	return nil
}

func (c *conn) flushAll(args [][]byte) error {
	if len(args) == 2 {
		if mode := string(lower(args[1])); mode != "sync" && mode != "async" {
			c.error("ERR syntax error")
			return nil
		}
	}
	if c.tenant.options.Flush == nil {
		c.error("ERR flushing is not allowed for this tenant")
		return nil
	}
	if c.tenant.options.Flush(c.listening.ctx) == nil {
		c.simple("OK")
	} else {
		c.error("ERR flushing failed")
	}
	return nil
}

// setInline is SET as a person types it: all of it is there.
func (c *conn) setInline(args [][]byte) error {
	return c.setWith(args[1], args[2], args[3:])
}

// stalled says that the rest of a value did not come in time.
func stalled(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }
