// Package identity owns the names by which Hearth's parts know each other:
// the constants a fork would change, the well-known ports, the local sockets
// and who may call them, and the certificates whose URI SAN says which role a
// peer plays. Every other package may use it. It holds no state and imports
// nothing of Hearth.
package identity

// Names that appear outside the process. Each is one constant, so that a fork
// can change it.
const (
	Name       = "hearth"
	Domain     = "hearth.dev"
	APIVersion = Domain + "/v1alpha1"
	// Driver is the name of the DRA driver, and the domain of what it publishes.
	Driver = Domain
)

// Default ports of the listeners. Every TCP listener binds loopback unless the
// configuration names another address and certificates.
const (
	PortIngress     = 7400
	PortRouterAdmin = 7401
	PortMirror      = 7410
	PortReport      = 7411
	PortAgentAdmin  = 7412
	PortRESP        = 7414
	PortKVPeer      = 7415
	PortDataAdmin   = 7416
)

// Default places on a node.
const (
	StateDir   = "/var/lib/hearth"
	RuntimeDir = "/run/hearth"
)
