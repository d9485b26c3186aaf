package identity

import "testing"

func TestOnlyAddressesOfThisNodeAreLoopback(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]bool{
		"127.0.0.1:80": true, "127.9.9.9:0": true, "[::1]:80": true, "[::ffff:127.0.0.1]:80": true, "localhost:80": true,
		"": false, ":80": false, "127.0.0.1": false, "0.0.0.0:80": false, "[::]:80": false, "192.0.2.1:80": false,
		"localhost.example:80": false, "127.0.0.1.example:80": false, "[::ffff:192.0.2.1]:80": false,
	} {
		if got := IsLoopback(address); got != want {
			t.Errorf("IsLoopback(%q) = %v, want %v", address, got, want)
		}
	}
}
