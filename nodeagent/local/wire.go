package local

import (
	"errors"
	"fmt"
	"time"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/nodeagent/netattr"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Version is the version of the protocol of PROTOCOL.md, in the header
// VersionHeader of every request and answer.
const (
	Version       = "1"
	VersionHeader = "Hearth-Local"
)

// Limits of the protocol.
const (
	maxLine     = 64 << 20 // bytes of one state
	maxCallBody = 64 << 10
	maxLendBody = 1 << 20
	maxHolders  = 1024
	maxHolder   = 300 // bytes
	maxCalls    = 64  // at once
	maxStreams  = 4
	maxAnswer   = 8 << 20
	maxText     = 16 << 10 // of an error
)

// Paths of the calls.
const (
	pathPrefix       = "/local/v1/"
	pathState        = pathPrefix + "state"
	pathLend         = pathPrefix + "lend"
	pathPods         = pathPrefix + "pods"
	pathHold         = pathPrefix + "hold"
	pathPull         = pathPrefix + "pull"
	pathRelease      = pathPrefix + "release"
	pathHolds        = pathPrefix + "holds"
	pathReserve      = pathPrefix + "kv/reserve"
	pathKVRelease    = pathPrefix + "kv/release"
	pathReservations = pathPrefix + "kv/reservations"
)

// line is one line of the state's stream; one without an epoch says only that
// the data role lives.
type line struct {
	Epoch  int64   `json:"epoch,omitempty"`
	Models []model `json:"models,omitempty"`
	Space  Space   `json:"space,omitzero"`
	// PullsEnded makes a line of what changes nothing else that is told.
	PullsEnded int64          `json:"pullsEnded,omitempty"`
	Problems   []string       `json:"problems,omitempty"`
	Weights    *stock.Weights `json:"weights,omitempty"` // nil while nothing is known
	KV         stock.Space    `json:"kv,omitzero"`
	KVFill     *KVFill        `json:"kvFill,omitempty"`
	Network    *Network       `json:"network,omitempty"`
	// ScaleOuts have no series.
	ScaleOuts []scaleout.Record `json:"scaleOuts,omitempty"`
}

// model is a weightcache.Status.
type model struct {
	Ref           artifact.Ref      `json:"ref"`
	Digest        artifact.Digest   `json:"digest,omitzero"`
	Commit        string            `json:"commit,omitempty"`
	Source        string            `json:"source,omitempty"`
	Access        artifact.Access   `json:"access,omitempty"`
	State         weightcache.State `json:"state"`
	Size          int64             `json:"size,omitempty"`
	Present       int64             `json:"present,omitempty"`
	Files         int               `json:"files,omitempty"`
	Detail        string            `json:"detail,omitempty"`
	BytesFetched  int64             `json:"bytesFetched,omitempty"`
	Views         []string          `json:"views,omitempty"`
	ViewsWithheld bool              `json:"viewsWithheld,omitempty"`
	Leases        int               `json:"leases,omitempty"`
	MetadataReady bool              `json:"metadataReady,omitempty"`
	LastUsed      time.Time         `json:"lastUsed,omitzero"`
}

func modelOf(s weightcache.Status) model { return model(s) }

func (m model) status() weightcache.Status { return weightcache.Status(m) }

// holdCall asks for a hold; pullCall for a pull; claimCall names a claim.
type (
	holdCall struct {
		Digest artifact.Digest `json:"digest"`
		Claim  string          `json:"claim"`
	}
	pullCall struct {
		Ref   artifact.Ref `json:"ref"`
		Claim string       `json:"claim"`
	}
	claimCall struct {
		Claim string `json:"claim"`
	}
	lendCall struct {
		Holders map[string]artifact.Digest `json:"holders"`
	}
	lendAnswer struct {
		Missing []string `json:"missing,omitempty"`
	}
	podsCall struct {
		Pods []netattr.Pod `json:"pods"`
	}
	claimsAnswer struct {
		Claims []string `json:"claims"`
	}
	dirAnswer struct {
		Dir string `json:"dir"`
	}
	reservationsAnswer struct {
		Reservations []stock.Reservation `json:"reservations"`
	}
	nothing struct{}
	failure struct {
		Code    string `json:"code"`
		Message string `json:"message"`
	}
	failureAnswer struct {
		Error *failure `json:"error"`
	}
)

// Codes of failures and the errors they stand for on either side.
var codes = []struct {
	code     string
	sentinel error
	status   int
}{
	{"not_ready", stock.ErrNotReady, 409},
	{"restricted", stock.ErrRestricted, 403},
	{"no_space", stock.ErrNoSpace, 507},
	{"unavailable", stock.ErrUnavailable, 503},
	{"invalid", artifact.ErrInvalid, 400},
}

// codeInternal stands for every other error.
const codeInternal = "internal"

// failureOf is what is told of an error, and the HTTP status.
func failureOf(err error) (*failure, int) {
	text := err.Error()
	if len(text) > maxText {
		text = text[:maxText]
	}
	for _, c := range codes {
		if errors.Is(err, c.sentinel) {
			return &failure{Code: c.code, Message: text}, c.status
		}
	}
	return &failure{Code: codeInternal, Message: text}, 500
}

// err is the error that a failure was.
func (f *failure) err() error {
	for _, c := range codes {
		if c.code == f.Code {
			return known{errors.New(f.Message), c.sentinel}
		}
	}
	return fmt.Errorf("data role: %s", f.Message)
}
