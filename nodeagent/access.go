package nodeagent

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/hubmirror"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// Pauses before asking sources about access: of what is unknown, and of all.
const (
	accessSoon = time.Minute
	accessOnce = time.Hour
)

// tokenSource is a source that knows the tokens of others.
type tokenSource interface {
	AcceptsToken(ctx context.Context, l *artifact.Listing, token string) error
	KnowsToken(ctx context.Context, token string) error
}

// keeper decides who may read what: by what sources said of their artifacts
// and by the grants of the configuration.
type keeper struct {
	grants []Grant
	// credential says of each configured source whether it is read with one.
	credential map[string]bool
	rules      []weightcache.Rule
}

func newKeeper(config Config, rules []weightcache.Rule) *keeper {
	k := &keeper{grants: config.Access.Grants, credential: map[string]bool{}, rules: rules}
	for _, s := range config.Sources {
		k.credential[s.Name] = s.TokenFile != ""
	}
	return k
}

// restricted says that a manifest's files are for those admitted only. What is
// not known counts as restricted where it may have taken a credential to read it.
func (k *keeper) restricted(m *artifact.Manifest) bool {
	if m.Access != artifact.AccessUnknown {
		return m.Access.Restricted()
	}
	credential, configured := k.credential[m.Source]
	return credential || !configured
}

// mayView implements weightcache.Options.MayView.
func (k *keeper) mayView(m *artifact.Manifest) bool {
	if !k.restricted(m) {
		return true
	}
	for _, g := range k.grants {
		if g.Views && g.covers(m.Ref) {
			return true
		}
	}
	return false
}

// errNotTold is no answer about the bearer of a token.
var errNotTold = fmt.Errorf("nothing is told of the bearer: %w", source.ErrNotFound)

// AskBearer implements hubmirror.TokenAsker. A token is shown to a source only
// where no other could be the one that answers for the ref.
func (k *keeper) AskBearer(ctx context.Context, ref artifact.Ref, token string) error {
	var one source.Source
	for _, r := range k.rules {
		if !r.Covers(ref) {
			continue
		}
		if one != nil {
			return errNotTold
		}
		one = r.Source
	}
	if asks, ok := one.(tokenSource); ok {
		return asks.KnowsToken(ctx, token)
	}
	return errNotTold
}

// AskToken implements hubmirror.TokenAsker. Only the source that a manifest
// came from sees the token.
func (k *keeper) AskToken(ctx context.Context, m *artifact.Manifest, token string, files bool) error {
	for _, r := range k.rules {
		if r.Source.Name() != m.Source || !r.Covers(m.Ref) {
			continue
		}
		asks, ok := r.Source.(tokenSource)
		switch {
		case !ok:
			return fmt.Errorf("ask source %q about a token: %w: it has no accounts", m.Source, source.ErrUnauthorized)
		case files:
			return asks.AcceptsToken(ctx, m.Listing(), token)
		}
		return asks.KnowsToken(ctx, token)
	}
	return fmt.Errorf("ask source %q about a token: %w: it is not configured for %s", m.Source, source.ErrUnauthorized, m.Ref)
}

// authOptions are those of the mirror.
func (a *Agent) authOptions() hubmirror.AuthOptions {
	c := a.config.Access
	o := hubmirror.AuthOptions{
		Demand:       !identity.IsLoopback(a.config.Listen.Mirror),
		OpenMetadata: c.OpenMetadata, Named: newTokenBook(c.Tokens, a.log).named,
		Restricted: a.keeper.restricted, Tokens: a.keeper,
		AcceptedFor: c.AcceptedFor.Std(), RefusedFor: c.RefusedFor.Std(), StaleFor: c.StaleFor.Std(),
	}
	for _, g := range c.Grants {
		o.Grants = append(o.Grants, hubmirror.Grant{Who: g.Who, Covers: g.covers})
	}
	return o
}

// checkAccess asks the sources from time to time to whom they serve what is
// held: at once where that is not known at the start, and soon where what was
// resolved since could not be told.
func (a *Agent) checkAccess(ctx context.Context) error {
	changed, unsubscribe := a.puller.Subscribe()
	defer unsubscribe()
	askAccess(ctx, a.puller, changed, a.log)
	return nil
}

// accessAsker is a Puller, as far as access goes.
type accessAsker interface {
	AccessUnknown() bool
	CheckAccess(ctx context.Context, onlyUnknown bool) (unknown int, err error)
}

func askAccess(ctx context.Context, asker accessAsker, changed <-chan struct{}, log *slog.Logger) {
	all := time.Now().Add(accessOnce) // when everything is asked about next
	next := all
	if asker.AccessUnknown() {
		next = time.Now()
	}
	for {
		timer := time.NewTimer(time.Until(next))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-changed:
			timer.Stop()
			if soon := time.Now().Add(accessSoon); soon.Before(next) && asker.AccessUnknown() {
				next = soon
			}
			continue
		case <-timer.C:
		}
		onlyUnknown := time.Now().Before(all)
		unknown, err := asker.CheckAccess(ctx, onlyUnknown)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			log.Warn("access not asked of every source", slog.Int("unknown", unknown), slog.Any("error", err))
		}
		if !onlyUnknown {
			all = time.Now().Add(accessOnce)
		}
		next = all
		if soon := time.Now().Add(accessSoon); unknown > 0 && soon.Before(all) {
			next = soon
		}
	}
}

// tokenBook knows the mirror's own tokens by their hashes.
type tokenBook struct {
	log *slog.Logger

	mu      sync.Mutex
	looked  time.Time // when a look at the files began last
	looking bool      // it goes on
	entries []tokenEntry
}

type tokenEntry struct {
	name  string
	valid bool
	sum   [sha256.Size]byte
	// Of an entry in a file:
	file     string
	modified time.Time
	size     int64
	failed   string
}

const (
	tokenFileEvery = time.Second // between two looks at the files
	tokenFileBytes = 4 << 10     // longest file
)

func newTokenBook(tokens []Token, log *slog.Logger) *tokenBook {
	b := &tokenBook{log: log}
	for _, t := range tokens {
		e := tokenEntry{name: t.Name, file: t.File}
		if sum, err := parseSum(t.SHA256); t.File == "" && err == nil {
			e.sum, e.valid = sum, true
		}
		b.entries = append(b.entries, e)
	}
	b.look()
	return b
}

// named implements hubmirror.AuthOptions.Named. It takes the same time whether
// and where a token is found.
func (b *tokenBook) named(sum [sha256.Size]byte) (name string, known bool) {
	b.look()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, e := range b.entries {
		if subtle.ConstantTimeCompare(e.sum[:], sum[:]) == 1 && e.valid {
			name, known = e.name, true
		}
	}
	return name, known
}

// look reads the files where that is due and nobody does; meanwhile what they
// held before stands for everybody else, however long a file takes.
func (b *tokenBook) look() {
	b.mu.Lock()
	now := time.Now()
	if b.looking || now.Sub(b.looked) < tokenFileEvery && !now.Before(b.looked) {
		b.mu.Unlock()
		return
	}
	b.looked, b.looking = now, true
	entries := slices.Clone(b.entries)
	b.mu.Unlock()
	for i := range entries {
		b.read(&entries[i])
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.entries, b.looking = entries, false
}

// read reads an entry's file where it changed. A file that cannot be read
// makes its token unknown.
func (b *tokenBook) read(e *tokenEntry) {
	if e.file == "" {
		return
	}
	info, err := os.Stat(e.file)
	if err == nil && e.valid && info.ModTime().Equal(e.modified) && info.Size() == e.size {
		return
	}
	var text []byte
	if err == nil {
		text, err = durable.ReadFile(durable.OS, e.file, tokenFileBytes)
	}
	token := strings.TrimSpace(string(text))
	if err == nil && (token == "" || strings.ContainsAny(token, " \t\r\n")) {
		err = errors.New("want one token")
	}
	e.valid = err == nil
	if err != nil {
		if e.failed != err.Error() {
			e.failed = err.Error()
			b.log.Error("token of the mirror not read", slog.String("token", e.name), slog.Any("error", err))
		}
		return
	}
	e.sum, e.modified, e.size, e.failed = sha256.Sum256([]byte(token)), info.ModTime(), info.Size(), ""
}
