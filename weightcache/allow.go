package weightcache

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// Rule allows one source for the refs that match a pattern. There is no
// default: a ref that no rule covers is refused.
type Rule struct {
	Source source.Source
	// Refs are patterns as path.Match reads them: on "org/name" for hub refs
	// ("acme/*", "acme/tiny@main" where the revision matters) and on the
	// absolute path for dir refs ("/models/*"). A trailing "/**" matches any
	// depth below. "hub://" or "dir://" may stand in front.
	Refs []string
}

// errNoPattern: a rule without patterns allows nothing, which is a mistake.
var errNoPattern = errors.New("a source rule names no ref pattern")

// checkRules finds mistakes before the first pull.
func checkRules(rules []Rule) error {
	names := map[string]bool{}
	for _, r := range rules {
		if r.Source == nil {
			return errors.New("check source rules: a rule has no source")
		}
		if names[r.Source.Name()] {
			return fmt.Errorf("check source rules: source %q is named twice", r.Source.Name())
		}
		names[r.Source.Name()] = true
		if len(r.Refs) == 0 {
			return fmt.Errorf("check source %q: %w", r.Source.Name(), errNoPattern)
		}
		for _, pattern := range r.Refs {
			if _, err := path.Match(strings.TrimSuffix(pattern, "/**"), ""); err != nil {
				return fmt.Errorf("check source %q: pattern %q: %w", r.Source.Name(), pattern, err)
			}
		}
	}
	return nil
}

// matchRef reports whether a pattern covers a ref.
func matchRef(pattern string, ref artifact.Ref) bool {
	if scheme, rest, found := strings.Cut(pattern, "://"); found {
		if scheme != ref.Scheme {
			return false
		}
		pattern = rest
	}
	if strings.HasPrefix(pattern, "/") != (ref.Scheme == artifact.SchemeDir) {
		return false
	}
	name := ref.Name
	if ref.Scheme == artifact.SchemeHub && strings.Contains(pattern, "@") {
		name += "@" + ref.Revision
	}
	if prefix, found := strings.CutSuffix(pattern, "/**"); found {
		depth := strings.Count(prefix, "/") + 1
		parts := strings.SplitN(name, "/", depth+1)
		if len(parts) <= depth {
			return false
		}
		pattern, name = prefix, strings.Join(parts[:depth], "/")
	}
	matched, err := path.Match(pattern, name)
	return err == nil && matched
}

// Covers reports whether a pattern of the rule covers a ref.
func (r Rule) Covers(ref artifact.Ref) bool {
	return slices.ContainsFunc(r.Refs, func(pattern string) bool { return matchRef(pattern, ref) })
}

// allowed gives the sources that may serve a ref, in the order of the rules.
func (p *Puller) allowed(ref artifact.Ref) ([]source.Source, error) {
	var sources []source.Source
	for _, r := range p.rules {
		if r.Covers(ref) {
			sources = append(sources, r.Source)
		}
	}
	if len(sources) == 0 {
		p.stats.refused.Add(1)
		return nil, fmt.Errorf("pull %s: %w", ref, ErrNotAllowed)
	}
	return sources, nil
}
