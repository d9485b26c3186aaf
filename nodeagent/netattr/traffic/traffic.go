// Package traffic names what network bytes are counted by: class, direction,
// locality and transport. The programs in nodeagent/netattr/bpf write the same
// numbers, so a value here never gets another meaning. It counts nothing itself.
package traffic

import "fmt"

// Class is what a byte is moved for. The zero value is a class that the kernel
// side left open: whoever reads decides it by the cgroup.
type Class uint8

// Classes.
const (
	ByCgroup Class = iota // not decided yet
	Weights               // artifacts of models, from a source or to another node
	KV                    // blocks of KV caches
	Serving               // requests to engines and their answers
	Image                 // container images
	Other                 // what is none of these
	classEnd
)

var classNames = [...]string{"by_cgroup", "weights", "kv", "serving", "image", "other"}

// Classes lists the classes that are told to people, in the order of their values.
func Classes() []Class { return []Class{Weights, KV, Serving, Image, Other} }

// String gives the class as metrics and pages have it.
func (c Class) String() string {
	if c < classEnd {
		return classNames[c]
	}
	return classNames[Other]
}

// ParseClass reads what String gives, without by_cgroup.
func ParseClass(text string) (Class, error) {
	for _, c := range Classes() {
		if c.String() == text {
			return c, nil
		}
	}
	return 0, fmt.Errorf("read class: %q is none of weights, kv, serving, image, other", text)
}

// Locality is how far the other end of a connection is.
type Locality uint8

// Localities. Only OffNode passes the node's network devices.
const (
	Unsettled Locality = iota // no byte has passed yet
	Loopback                  // the same network namespace
	SameNode                  // another network namespace of this node
	OffNode
	localityEnd
)

var localityNames = [...]string{"unsettled", "loopback", "same_node", "off_node"}

// Localities lists the localities that are told to people.
func Localities() []Locality { return []Locality{Loopback, SameNode, OffNode} }

// String gives the locality as metrics and pages have it.
func (l Locality) String() string {
	if l < localityEnd {
		return localityNames[l]
	}
	return localityNames[OffNode]
}

// Transport is the protocol that carries a byte.
type Transport uint8

// Transports.
const (
	TCP    Transport = iota // counted by the kernel's sockets
	NonTCP                  // UDP and all else that has a socket
	RDMA                    // past the kernel, seen at the port alone
	transportEnd
)

var transportNames = [...]string{"tcp", "other", "rdma"}

// String gives the transport as metrics and pages have it.
func (t Transport) String() string {
	if t < transportEnd {
		return transportNames[t]
	}
	return transportNames[NonTCP]
}

// Direction is seen from this node.
type Direction uint8

// Directions, named as OpenTelemetry's network.io.direction names them.
const (
	Receive Direction = iota
	Transmit
)

// String gives the direction as metrics and pages have it.
func (d Direction) String() string {
	if d == Receive {
		return "receive"
	}
	return "transmit"
}

// Counts are bytes of payload that one kind of traffic moved, and what their
// way took besides. They only grow.
type Counts struct {
	Received      uint64 // payload that arrived in order, each byte once
	Transmitted   uint64 // payload sent, each byte once
	Retransmitted uint64 // payload sent again
	// ReceivedHeaders and TransmittedHeaders are the bytes of link, network and
	// transport headers, as far as the socket tells how many segments there were.
	ReceivedHeaders    uint64
	TransmittedHeaders uint64
}

// Add adds the counts of o.
func (c *Counts) Add(o Counts) {
	c.Received += o.Received
	c.Transmitted += o.Transmitted
	c.Retransmitted += o.Retransmitted
	c.ReceivedHeaders += o.ReceivedHeaders
	c.TransmittedHeaders += o.TransmittedHeaders
}

// Minus gives the growth since old. A count that is below its old value gives 0.
func (c Counts) Minus(old Counts) Counts {
	less := func(a, b uint64) uint64 {
		if a < b {
			return 0
		}
		return a - b
	}
	return Counts{
		Received: less(c.Received, old.Received), Transmitted: less(c.Transmitted, old.Transmitted), Retransmitted: less(c.Retransmitted, old.Retransmitted),
		ReceivedHeaders: less(c.ReceivedHeaders, old.ReceivedHeaders), TransmittedHeaders: less(c.TransmittedHeaders, old.TransmittedHeaders),
	}
}

// Wire is what passed the node's devices one way, payload, repeats and headers.
func (c Counts) Wire(d Direction) uint64 {
	if d == Receive {
		return c.Received + c.ReceivedHeaders
	}
	return c.Transmitted + c.Retransmitted + c.TransmittedHeaders
}
