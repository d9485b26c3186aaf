// Package bpf owns the programs in the kernel that count network bytes: it
// loads and attaches them, each by itself, walks the sockets, reads the counts
// and marks sockets by their descriptors. nodeagent/netattr calls it. It never
// knows pods or metrics, never changes a connection, and attaches nothing to
// the path of a packet unless Options.Datagrams asks for it. What the programs
// do is in ../NETWORK.md; their source is c/netattr.bpf.c, and the object made
// from it by `make generate` is committed.
package bpf
