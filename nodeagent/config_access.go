package nodeagent

import (
	"encoding/hex"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/hubmirror"
)

// Access says who may read what through the mirror and in views.
type Access struct {
	// OpenMetadata answers metadata of open artifacts to callers without an
	// identity on addresses that are not loopback.
	OpenMetadata bool    `yaml:"openMetadata"`
	Tokens       []Token `yaml:"tokens"`
	Grants       []Grant `yaml:"grants"`
	// AcceptedFor, RefusedFor and StaleFor are how long a source's yes and no to
	// a caller's token hold, and a yes while the source cannot be asked.
	AcceptedFor units.Duration `yaml:"acceptedFor"`
	RefusedFor  units.Duration `yaml:"refusedFor"`
	StaleFor    units.Duration `yaml:"staleFor"`
}

// Token is a bearer token of the mirror's own: by its hash, or in a file.
type Token struct {
	Name   string `yaml:"name"`
	SHA256 string `yaml:"sha256"` // 64 hexadecimal digits
	File   string `yaml:"file"`   // read again when it changes
}

// Grant opens restricted artifacts without asking their source.
type Grant struct {
	// Who are "client/NAME", "agent/NAME" or "router/NAME" by certificate,
	// "token/NAME", or "any".
	Who  []string `yaml:"who"`
	Refs []string `yaml:"refs"` // patterns as in Source.Refs
	// Views lets every program of the node read them in views.
	Views bool `yaml:"views"`
}

// Limits of Access.
const (
	maxTokens = 1024 // also of grants
	maxOfOne  = 256  // who and refs of one grant
)

func defaultAccess() Access {
	return Access{
		AcceptedFor: units.Duration(15 * time.Minute), RefusedFor: units.Duration(time.Minute), StaleFor: units.Duration(24 * time.Hour),
	}
}

func (a Access) validate(v *configfile.Problems) {
	names := map[string]bool{}
	v.Check(len(a.Tokens) <= maxTokens, "access.tokens", "has %d entries, want at most %d", len(a.Tokens), maxTokens)
	for i, t := range a.Tokens {
		field := fmt.Sprintf("access.tokens[%d]", i)
		v.Check(identity.ValidName(t.Name) && !names[t.Name], field+".name", "is %q, want a name of letters, digits, - _ and . that no other token has", t.Name)
		names[t.Name] = true
		v.Check((t.SHA256 == "") != (t.File == ""), field, "wants either sha256 or file")
		// It may be the token itself, put there by mistake: it is not repeated.
		_, err := parseSum(t.SHA256)
		v.Check(t.SHA256 == "" || err == nil, field+".sha256", "is no SHA-256, want the 64 hexadecimal digits that `printf %%s TOKEN | sha256sum` gives")
		v.Check(t.File == "" || filepath.IsAbs(t.File), field+".file", "is %q, want an absolute path", t.File)
	}
	v.Check(len(a.Grants) <= maxTokens, "access.grants", "has %d entries, want at most %d", len(a.Grants), maxTokens)
	for i, g := range a.Grants {
		g.validate(v, fmt.Sprintf("access.grants[%d]", i), names)
	}
	v.Check(a.AcceptedFor > 0, "access.acceptedFor", "is %s, want a positive duration such as 15m", a.AcceptedFor)
	v.Check(a.RefusedFor > 0, "access.refusedFor", "is %s, want a positive duration such as 1m", a.RefusedFor)
	v.Check(a.StaleFor >= a.AcceptedFor, "access.staleFor", "is %s, want at least acceptedFor, %s", a.StaleFor, a.AcceptedFor)
}

func (g Grant) validate(v *configfile.Problems, field string, tokens map[string]bool) {
	v.Check(len(g.Who) > 0 || g.Views, field, "opens nothing: want who, or views: true")
	v.Check(len(g.Who) <= maxOfOne && len(g.Refs) <= maxOfOne, field, "wants at most %d entries of who and of refs", maxOfOne)
	for i, who := range g.Who {
		kind, name, _ := strings.Cut(who, "/")
		roles := []identity.Role{identity.RoleAgent, identity.RoleRouter, identity.RoleClient}
		known := who == hubmirror.Anybody || kind == "token" && tokens[name] ||
			slices.Contains(roles, identity.Role(kind)) && identity.ValidName(name)
		v.Check(known, fmt.Sprintf("%s.who[%d]", field, i), "is %q, want client/NAME, agent/NAME, router/NAME, token/NAME of access.tokens, or any", who)
	}
	v.Check(len(g.Refs) > 0, field+".refs", `is empty, want patterns such as "org/*"`)
	for i, pattern := range g.Refs {
		_, err := path.Match(strings.TrimSuffix(pattern, "/**"), "")
		v.Check(err == nil && pattern != "", fmt.Sprintf("%s.refs[%d]", field, i), "is %q, want a pattern such as org/name or org/*", pattern)
	}
}

// covers reports whether a grant is about a ref.
func (g Grant) covers(ref artifact.Ref) bool { return weightcache.Rule{Refs: g.Refs}.Covers(ref) }

func parseSum(text string) (sum [32]byte, err error) {
	raw, err := hex.DecodeString(text)
	if err == nil && len(raw) != len(sum) {
		err = hex.ErrLength
	}
	if err == nil {
		copy(sum[:], raw)
	}
	return sum, err
}
