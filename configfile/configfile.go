// Package configfile reads the one strict YAML file that configures a
// component, keeps secrets out of its errors, and prints a configuration. The roots
// (nodeagent, router) and cmd call it. It knows no component's fields, keeps no
// state, and never fills in defaults or fetches anything: the caller passes a
// struct that already holds its defaults.
package configfile

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/goccy/go-yaml"

	"github.com/hearth-dev/hearth/identity"
)

// MaxSize bounds a configuration file, in bytes. A larger file is refused
// before it is parsed.
const MaxSize = 1 << 20

// ErrInvalid marks every error about the text of a configuration, as opposed to
// one about reading the file.
var ErrInvalid = errors.New("invalid configuration")

// Load reads the file at path over into, which must be a pointer to a struct
// that holds the defaults. The file is one YAML document whose apiVersion is
// identity.APIVersion and whose kind is kind; unknown fields, duplicate keys,
// anchors, aliases and a second document are errors. An error about the text
// wraps ErrInvalid, starts with "path:line:column" where a place is known, and
// shows the lines around it.
func Load(path, kind string, into any) error {
	file, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open configuration: %w", err)
	}
	defer func() { _ = file.Close() }()
	data, err := io.ReadAll(io.LimitReader(file, MaxSize+1))
	if err != nil {
		return fmt.Errorf("read configuration %s: %w", path, err)
	}
	return Parse(path, data, kind, into)
}

// Marshal gives v as YAML for people, field by field under its yaml tags, with
// nothing left out. It is the text of the effective configuration in the log and
// at /debug/config, so no field of a configuration may hold a secret: a field
// names the file that does.
func Marshal(v any) ([]byte, error) {
	text, err := yaml.MarshalWithOptions(v, yaml.IndentSequence(true))
	if err != nil {
		return nil, fmt.Errorf("marshal configuration: %w", err)
	}
	return text, nil
}

// APIVersion is the value every configuration file carries in its apiVersion.
const APIVersion = identity.APIVersion
