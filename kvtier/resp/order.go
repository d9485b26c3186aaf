package resp

import "github.com/hearth-dev/hearth/kvtier/block"

// order guesses which block continues which from the order in which one
// connection names them. A wrong guess costs nothing but the order of eviction.
type order struct {
	asked  [16]block.Key // the last keys asked for in one row
	count  int           // of asked, in all
	family family        // of the row
	open   bool          // nothing came between since the row's last key

	stored       block.Key
	storedFamily family
}

// ask notes a key that was asked for.
func (o *order) ask(f family, key block.Key) {
	if f == 0 {
		return
	}
	// A key that comes again, or of another family, begins another prefix.
	if !o.open || f != o.family || o.find(key) >= 0 {
		o.count = 0
	}
	o.asked[o.count%len(o.asked)] = key
	o.count++
	o.family, o.open = f, true
	o.storedFamily = 0
}

// store notes a key that is stored, and gives the one before it where there is a guess.
func (o *order) store(f family, key block.Key) (parent block.Key, ok bool) {
	if f == 0 {
		return block.Key{}, false
	}
	if at := o.find(key); f == o.family && at >= 0 {
		if at > 0 && at > o.count-len(o.asked) {
			parent, ok = o.asked[(at-1)%len(o.asked)], true
		}
	} else if o.storedFamily == f {
		parent, ok = o.stored, true
	}
	o.open = false
	o.stored, o.storedFamily = key, f
	return parent, ok && parent != key
}

// find gives the position of a key in the row, or -1.
func (o *order) find(key block.Key) int {
	for at := o.count - 1; at >= 0 && at >= o.count-len(o.asked); at-- {
		if o.asked[at%len(o.asked)] == key {
			return at
		}
	}
	return -1
}
