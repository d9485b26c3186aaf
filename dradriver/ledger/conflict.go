package ledger

import (
	"fmt"
	"slices"
)

// device is what a claim has exclusively or shares.
type device struct{ pool, name string }

func (r *Result) device() device { return device{r.Pool, r.Device} }

// Conflict says that another claim has a device.
type Conflict struct {
	Pool, Device         string
	UID, Namespace, Name string // of the claim that has it
	// OtherNamespace says that the device may be shared, but not with that
	// claim's namespace.
	OtherNamespace bool
}

// Error names the device and the claim that has it.
func (c *Conflict) Error() string {
	if c.OtherNamespace {
		return fmt.Sprintf("device %s/%s is in use by claim %s/%s of another namespace, and its class does not share GPUs across namespaces", c.Pool, c.Device, c.Namespace, c.Name)
	}
	return fmt.Sprintf("device %s/%s is in use by claim %s/%s", c.Pool, c.Device, c.Namespace, c.Name)
}

// conflict finds the first device of e that another claim's entry forbids it.
// owners gives the live entries that have a device.
func conflict(e *Entry, owners func(device) []*Entry) *Conflict {
	for i := range e.Results {
		r := &e.Results[i]
		if r.AdminAccess {
			continue
		}
		for _, o := range owners(r.device()) {
			if o.UID == e.UID {
				continue
			}
			exclusive, apart := forbids(o, r, e.Namespace)
			if exclusive || apart {
				return &Conflict{r.Pool, r.Device, o.UID, o.Namespace, o.Name, !exclusive}
			}
		}
	}
	return nil
}

// forbids says why claim o forbids a device to a claim of a namespace: one of
// the two has it for itself alone, or they are to stay apart.
func forbids(o *Entry, r *Result, namespace string) (exclusive, apart bool) {
	for i := range o.Results {
		has := &o.Results[i]
		if has.device() != r.device() || has.AdminAccess {
			continue
		}
		exclusive = exclusive || !r.Shared || !has.Shared
		apart = apart || r.Kind == KindGPU && o.Namespace != namespace && (!r.AcrossNamespaces || !has.AcrossNamespaces)
	}
	return exclusive, apart
}

// index knows which claims have a device.
type index map[device][]string

func (x index) add(e *Entry) {
	for i := range e.Results {
		d := e.Results[i].device()
		if !slices.Contains(x[d], e.UID) {
			x[d] = append(x[d], e.UID)
			slices.Sort(x[d])
		}
	}
}

func (x index) remove(e *Entry) {
	for i := range e.Results {
		d := e.Results[i].device()
		left := slices.DeleteFunc(slices.Clone(x[d]), func(uid string) bool { return uid == e.UID })
		if x[d] = left; len(left) == 0 {
			delete(x, d)
		}
	}
}
