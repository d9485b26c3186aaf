package nodeagent

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/units"
)

// KV configures the KV space: what claims and tenants may take together, and how
// blocks are kept. Nothing is taken, and nothing made on the drive, while its
// sizes are 0.
type KV struct {
	Dir string `yaml:"dir"`
	// Drives are further directories for blocks, one a drive.
	Drives []string    `yaml:"drives"`
	Memory units.Bytes `yaml:"memory"` // of all claims and tenants together
	NVMe   units.Bytes `yaml:"nvme"`
	// NamespaceMemory and NamespaceNVMe bound what the claims of one namespace
	// take together; 0 is no bound.
	NamespaceMemory units.Bytes `yaml:"namespaceMemory"`
	NamespaceNVMe   units.Bytes `yaml:"namespaceNVMe"`
	// DriveWritesPerDay is how often the drives may be written over in a day, 0
	// without a bound; DriveCapacity what one such write is: 0 is the size of the
	// file systems.
	DriveWritesPerDay float64     `yaml:"driveWritesPerDay"`
	DriveCapacity     units.Bytes `yaml:"driveCapacity"`
	// DriveEndurance is what the drives are rated for, in bytes written; 0 is
	// unknown.
	DriveEndurance units.Bytes `yaml:"driveEndurance"`
	// Admit is AdmitUsed or AdmitAll: which blocks of claims go to NVMe.
	Admit string `yaml:"admit"`
	// VerifyEvery: of so many reads from RAM one has its checksum compared.
	VerifyEvery int `yaml:"verifyEvery"`
	// PrefillRate is how many tokens an engine computes in a second, of claims; 0
	// is not known, and then every block is worth its load. BlockTokens is the
	// number of tokens in a block whose client does not say.
	PrefillRate float64    `yaml:"prefillRate"`
	BlockTokens int        `yaml:"blockTokens"`
	Tenants     []KVTenant `yaml:"tenants"`
	// Peers are other nodes, and perhaps this one, from which blocks of tenants come
	// that say so. Zone is where this node is, PeerZones PeersOwn or PeersAll: whom
	// it asks. PeerRate is of what Listen.KVPeer sends, 0 without a bound.
	Peers     []KVPeer   `yaml:"peers"`
	Zone      string     `yaml:"zone"`
	PeerZones string     `yaml:"peerZones"`
	PeerRate  units.Rate `yaml:"peerRate"`
}

// KVPeer is a node whose blocks this one may have.
type KVPeer struct {
	Name string `yaml:"name"` // of the node
	Addr string `yaml:"addr"` // its listen.kvPeer, host:port
	Zone string `yaml:"zone"`
}

// KVTenant is somebody who keeps blocks without a claim.
type KVTenant struct {
	Name string `yaml:"name"`
	// CredentialFile holds the password of its clients on listen.resp. Anonymous
	// says that clients there who give none are this tenant. Socket is a unix
	// socket of its own, where no password is asked.
	CredentialFile string `yaml:"credentialFile"`
	Anonymous      bool   `yaml:"anonymous"`
	Socket         string `yaml:"socket"`
	// Memory and NVMe are its own; up to MemoryLimit it borrows what others leave.
	Memory      units.Bytes `yaml:"memory"`
	NVMe        units.Bytes `yaml:"nvme"`
	MemoryLimit units.Bytes `yaml:"memoryLimit"`
	// The rest stands over the fields of KV, where it is set.
	Admit             string  `yaml:"admit"`
	PrefillRate       float64 `yaml:"prefillRate"`
	BlockTokens       int     `yaml:"blockTokens"`
	EncryptionKeyFile string  `yaml:"encryptionKeyFile"` // 32 bytes or more
	// Peers shares blocks with the tenant of the same name on kv.peers, both ways.
	Peers bool `yaml:"peers"`
}

// What goes to NVMe.
const (
	AdmitUsed = "used" // what is used again, as far as the drives' wear allows
	AdmitAll  = "all"  // everything, as far as the drives' wear allows
)

// maxTenants bounds kv.tenants.
const maxTenants = 256

func (k KV) validate(v *configfile.Problems) {
	v.Check(filepath.IsAbs(k.Dir), "kv.dir", "is %q, want an absolute path", k.Dir)
	for i, dir := range k.Drives {
		v.Check(filepath.IsAbs(dir) && dir != k.Dir && !slices.Contains(k.Drives[:i], dir), fmt.Sprintf("kv.drives[%d]", i),
			"is %q, want an absolute path that is neither kv.dir nor named before", dir)
	}
	v.Check(len(k.Drives) < 32, "kv.drives", "has %d entries, want at most 31", len(k.Drives))
	v.Check(k.NamespaceMemory <= k.Memory, "kv.namespaceMemory", "is %s, want at most kv.memory, %s", k.NamespaceMemory, k.Memory)
	v.Check(k.NamespaceNVMe <= k.NVMe, "kv.namespaceNVMe", "is %s, want at most kv.nvme, %s", k.NamespaceNVMe, k.NVMe)
	v.Check(k.DriveWritesPerDay >= 0, "kv.driveWritesPerDay", "is %g, want 0 (no bound) or more", k.DriveWritesPerDay)
	v.Check(k.DriveCapacity >= 0 && k.DriveEndurance >= 0, "kv.driveCapacity", "and kv.driveEndurance want no negative size")
	v.Check(slices.Contains([]string{AdmitUsed, AdmitAll}, k.Admit), "kv.admit", "is %q, want %s or %s", k.Admit, AdmitUsed, AdmitAll)
	v.Check(k.VerifyEvery >= 1, "kv.verifyEvery", "is %d, want 1 (every read) or more", k.VerifyEvery)
	v.Check(k.PrefillRate >= 0 && k.BlockTokens >= 0, "kv.prefillRate", "and kv.blockTokens want 0 (not known) or more")
	k.validateTenants(v)
}

func (k KV) validateTenants(v *configfile.Problems) {
	v.Check(len(k.Tenants) <= maxTenants, "kv.tenants", "has %d entries, want at most %d", len(k.Tenants), maxTenants)
	var memory, nvme units.Bytes
	names, sockets, open := map[string]bool{}, map[string]bool{}, ""
	for i, t := range k.Tenants {
		field := fmt.Sprintf("kv.tenants[%d]", i)
		v.Check(t.Name != "" && len(t.Name) <= 128 && !strings.ContainsAny(t.Name, " /\t\n") && !names[t.Name], field+".name",
			"is %q, want a name without spaces and / that no other tenant has", t.Name)
		names[t.Name] = true
		v.Check(t.CredentialFile == "" || filepath.IsAbs(t.CredentialFile), field+".credentialFile", "is %q, want an absolute path", t.CredentialFile)
		v.Check(t.Socket == "" || filepath.IsAbs(t.Socket) && !sockets[t.Socket], field+".socket", "is %q, want an absolute path that no other tenant has", t.Socket)
		sockets[t.Socket] = true
		v.Check(t.CredentialFile != "" || t.Socket != "" || t.Anonymous, field, "has no client: want credentialFile, socket or anonymous")
		if t.Anonymous {
			v.Check(open == "", field+".anonymous", "is true, as of %s: clients who give no password can be one tenant only", open)
			v.Check(t.CredentialFile == "", field+".anonymous", "is true beside credentialFile, want one of them")
			open = t.Name
		}
		v.Check(t.Memory >= 0 && t.NVMe >= 0 && t.Memory+t.NVMe+t.MemoryLimit > 0, field, "wants memory, nvme or both")
		v.Check(t.MemoryLimit == 0 || t.MemoryLimit >= t.Memory && t.MemoryLimit <= k.Memory, field+".memoryLimit",
			"is %s, want at least its memory, %s, and at most kv.memory, %s", t.MemoryLimit, t.Memory, k.Memory)
		v.Check(slices.Contains([]string{"", AdmitUsed, AdmitAll}, t.Admit), field+".admit", "is %q, want %s or %s", t.Admit, AdmitUsed, AdmitAll)
		v.Check(t.PrefillRate >= 0 && t.BlockTokens >= 0, field+".prefillRate", "and blockTokens want 0 (not known) or more")
		v.Check(t.EncryptionKeyFile == "" || filepath.IsAbs(t.EncryptionKeyFile), field+".encryptionKeyFile", "is %q, want an absolute path", t.EncryptionKeyFile)
		memory, nvme = memory+t.Memory, nvme+t.NVMe
	}
	v.Check(memory <= k.Memory, "kv.memory", "is %s, want at least what kv.tenants have together, %s", k.Memory, memory)
	v.Check(nvme <= k.NVMe, "kv.nvme", "is %s, want at least what kv.tenants have together, %s", k.NVMe, nvme)
}

// validateRESP says what is wrong with the address for the clients of tenants.
func (k KV) validateRESP(v *configfile.Problems, l Listen) {
	if l.RESP == "" || identity.IsLoopback(l.RESP) {
		return
	}
	v.Check(l.Insecure, "listen.resp", "is %q, not loopback: the protocol has no encryption of its own, so say listen.insecure, or use sockets", l.RESP)
	for i, t := range k.Tenants {
		v.Check(!t.Anonymous, fmt.Sprintf("kv.tenants[%d].anonymous", i), "is true, and listen.resp is %q: whoever reaches that address would be this tenant", l.RESP)
	}
}

// set says whether there is any KV space.
func (k KV) set() bool { return k.Memory > 0 || k.NVMe > 0 }

// own is what tenants have that are no claims.
func (k KV) own() (memory, nvme units.Bytes) {
	for _, t := range k.Tenants {
		memory, nvme = memory+t.Memory, nvme+t.NVMe
	}
	return memory, nvme
}

// spec is what a tenant without a claim may take. Errors are those of its key file.
func (k KV) spec(t KVTenant) (kvtier.TenantSpec, error) {
	s := kvtier.TenantSpec{
		Kind: kvtier.TenantCredential, Name: t.Name, Memory: t.Memory, NVMe: t.NVMe, MemoryLimit: t.MemoryLimit,
		AdmitAll: or(t.Admit, k.Admit) == AdmitAll, PrefillRate: or(t.PrefillRate, k.PrefillRate), BlockTokens: or(t.BlockTokens, k.BlockTokens),
	}
	if t.EncryptionKeyFile != "" {
		key, err := readSecret(t.EncryptionKeyFile)
		if err == nil && len(key) < 32 {
			err = errors.New("it has less than 32 bytes")
		}
		if err != nil {
			return s, fmt.Errorf("read encryptionKeyFile of KV tenant %s: %w", t.Name, err)
		}
		s.EncryptionKey = key
	}
	return s, nil
}

// claimSpec is what a claim's blocks may take.
func (k KV) claimSpec(r kvtier.Reservation) kvtier.TenantSpec {
	return kvtier.TenantSpec{
		Kind: kvtier.TenantClaim, Name: r.Claim, Memory: r.Memory, NVMe: r.NVMe,
		AdmitAll: k.Admit == AdmitAll, PrefillRate: k.PrefillRate, BlockTokens: k.BlockTokens,
	}
}

// or is a where it is set, else b.
func or[T comparable](a, b T) T {
	var zero T
	if a != zero {
		return a
	}
	return b
}

// password is that of the tenant's clients, empty for none.
func (t KVTenant) password() (string, error) {
	if t.CredentialFile == "" {
		return "", nil
	}
	password, err := readSecret(t.CredentialFile)
	if err == nil && len(password) == 0 {
		err = errors.New("it is empty")
	}
	if err != nil {
		return "", fmt.Errorf("read credentialFile of KV tenant %s: %w", t.Name, err)
	}
	return string(password), nil
}

// maxSecret bounds the file of a credential or a key.
const maxSecret = 64 << 10

// readSecret reads a file without the line feeds at its end.
func readSecret(path string) ([]byte, error) {
	data, err := durable.ReadRegular(durable.OS, path, maxSecret)
	if err != nil {
		return nil, err
	}
	return []byte(strings.TrimRight(string(data), "\r\n")), nil
}
