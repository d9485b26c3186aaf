// Package drives holds the tests of the real agent on real file systems that
// fill up, lose their inodes, turn read-only and vanish. They mount loop
// devices, so they need root and the build tag root: `make test-root`. Nothing
// calls it.
package drives
