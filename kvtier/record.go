package kvtier

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/kvtier/block"
)

const (
	tenantsDir = "tenants"
	blocksDir  = "blocks"
	tenantFile = "tenant.json"
	// maxNamespaces bounds the namespaces of a tenant, maxTenantFile its record.
	maxNamespaces = 1024
	maxTenantFile = 8 << 20
	saltBytes     = 32
)

// tenantRecord is the content of tenant.json.
type tenantRecord struct {
	Version    int              `json:"version"`
	Kind       string           `json:"kind"`
	Name       string           `json:"name"`
	Salt       string           `json:"salt"` // hexadecimal
	Namespaces []block.Identity `json:"namespaces"`

	ids []block.Namespace // of Namespaces
}

// newRecord makes the record of a tenant that has none.
func newRecord(kind, name string) tenantRecord {
	salt := make([]byte, saltBytes)
	_, _ = rand.Read(salt)
	return tenantRecord{Version: FormatVersion, Kind: kind, Name: name, Salt: hex.EncodeToString(salt), Namespaces: []block.Identity{}}
}

// with gives the record with one namespace more.
func (r tenantRecord) with(identity block.Identity) tenantRecord {
	id, err := identity.ID()
	if err != nil {
		return r
	}
	r.Namespaces = append(slices.Clip(r.Namespaces), identity)
	r.ids = append(slices.Clip(r.ids), id)
	return r
}

// namespaceAt is the identifier of the namespace at a place.
func (r tenantRecord) namespaceAt(place uint16) block.Namespace {
	if int(place) < len(r.ids) {
		return r.ids[place]
	}
	return block.Namespace{}
}

func (t *Tenant) dir() string        { return filepath.Join(t.cache.opts.Dir, tenantsDir, t.folder()) }
func (t *Tenant) recordPath() string { return filepath.Join(t.dir(), tenantFile) }

// readRecord reads the tenant's record, or makes one durably. What cannot be
// understood is put into quarantine, and the tenant begins anew: without its
// namespaces nothing on the drives is of use.
func (t *Tenant) readRecord() (tenantRecord, error) {
	fsys := t.cache.fs
	r, err := t.storedRecord()
	switch {
	case err == nil, errors.Is(err, ErrNewer):
		return r, err
	case notExist(err):
	case errors.Is(err, ErrInvalid), errors.Is(err, durable.ErrTooLong):
		t.log.Error("a tenant's record is unreadable, its blocks begin anew")
		to := filepath.Join(t.cache.opts.Dir, quarantineDir, strconv.FormatInt(time.Now().UnixNano(), 10)+"-"+t.folder()+".json")
		if err := t.cache.fs.Rename(t.recordPath(), to); err != nil {
			return tenantRecord{}, err
		}
	default:
		return tenantRecord{}, err
	}
	r = newRecord(t.kind, t.name)
	if err := durable.MkdirAllSynced(fsys, t.dir(), 0o700); err != nil {
		return tenantRecord{}, err
	}
	// Blocks from before are unknown until their namespace is known again, and would
	// come back then over what was ended or stored meanwhile.
	if err := t.discardBlocks(); err != nil {
		return tenantRecord{}, err
	}
	return r, t.writeRecord(r)
}

// storedRecord reads the tenant's record. Errors wrap ErrInvalid, ErrNewer or
// durable.ErrTooLong where they are about what it says.
func (t *Tenant) storedRecord() (tenantRecord, error) {
	data, err := durable.ReadRegular(t.cache.fs, t.recordPath(), maxTenantFile)
	if err != nil {
		return tenantRecord{}, err
	}
	return decodeTenant(data, t.kind, t.name)
}

func (t *Tenant) writeRecord(r tenantRecord) error {
	data, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	return durable.WriteFile(t.cache.fs, t.recordPath(), append(data, '\n'), 0o600)
}

// decodeTenant reads and checks the record of a tenant. Errors wrap ErrInvalid or
// ErrNewer.
func decodeTenant(data []byte, kind, name string) (tenantRecord, error) {
	var version struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return tenantRecord{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if version.Version > FormatVersion {
		return tenantRecord{}, fmt.Errorf("%w: record of tenant %s is of version %d, this code knows %d", ErrNewer, name, version.Version, FormatVersion)
	}
	var r tenantRecord
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&r); err != nil {
		return tenantRecord{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if salt, err := hex.DecodeString(r.Salt); err != nil || len(salt) != saltBytes || r.Version != FormatVersion {
		return tenantRecord{}, fmt.Errorf("%w: record of tenant %s has no salt of %d bytes or no version", ErrInvalid, name, saltBytes)
	}
	if r.Kind != kind || r.Name != name || len(r.Namespaces) > maxNamespaces {
		return tenantRecord{}, fmt.Errorf("%w: the record is of tenant %.140q, not of %s", ErrInvalid, r.Kind+" "+r.Name, kind+" "+name)
	}
	for _, identity := range r.Namespaces {
		id, err := identity.ID()
		if err != nil || identity.Tenant != kind+" "+name || slices.Contains(r.ids, id) {
			return tenantRecord{}, fmt.Errorf("%w: record of tenant %s has a namespace that is another's or comes twice", ErrInvalid, name)
		}
		r.ids = append(r.ids, id)
	}
	return r, nil
}

// discard takes the tenant's files away: its record first, without which its
// blocks are of no use to anybody.
func (t *Tenant) discard() error {
	c := t.cache
	t.saving <- struct{}{} // whoever writes a checkpoint that began before
	defer func() { <-t.saving }()
	if err := c.trash(c.opts.Dir, filepath.Join(tenantsDir, t.folder())); err != nil {
		return err
	}
	var err error
	for _, drive := range c.drives() {
		err = errors.Join(err, c.trash(drive, filepath.Join(blocksDir, t.folder())))
	}
	return err
}

// drives are the directories that hold segments.
func (c *Cache) drives() []string { return append([]string{c.opts.Dir}, c.opts.Drives...) }

// trash moves a directory below a drive's root into its trash, durably.
func (c *Cache) trash(root, name string) error {
	from := filepath.Join(root, name)
	if _, err := c.fs.Lstat(from); notExist(err) {
		return nil
	}
	to := filepath.Join(root, trashDir, strconv.FormatInt(time.Now().UnixNano(), 10)+"-"+filepath.Base(name))
	if err := c.fs.Rename(from, to); err != nil && !notExist(err) {
		return err
	}
	return errors.Join(c.fs.SyncDir(filepath.Dir(to)), c.fs.SyncDir(filepath.Dir(from)))
}
