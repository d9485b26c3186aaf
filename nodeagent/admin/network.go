package admin

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/scaleout"
)

// MaxOwners is how many rows of owners a Network has.
const MaxOwners = 512

// Network is who moved bytes over the node's network.
type Network struct {
	At    time.Time `json:"at"`    // of the sample
	Since time.Time `json:"since"` // of Devices, Owned and Unattributed
	// Sight is full, partial, devices or none; Reason says what is missing.
	Sight   string      `json:"sight"`
	Reason  string      `json:"reason,omitempty"`
	Sensors []NetSensor `json:"sensors"`
	// Totals and Owners are payload since the counts began, which may be before
	// the agent did.
	Totals     []NetTotal `json:"totals"`
	Owners     []NetOwner `json:"owners"`
	MoreOwners int        `json:"moreOwners,omitempty"` // that have no row
	// Devices is what the network devices counted, Owned what of it has an owner,
	// with repeats and headers, Unattributed what has none.
	Devices      NetBytes `json:"devices"`
	Owned        NetBytes `json:"owned"`
	Unattributed NetBytes `json:"unattributed"`
	Live         NetLive  `json:"live"`
}

// NetSight is how much of the network a node sees.
type NetSight struct {
	Sight  string `json:"sight"`            // full, partial, devices or none
	Reason string `json:"reason,omitempty"` // what is missing
}

// NetSensor is one thing by which the network is watched.
type NetSensor struct {
	Name   string `json:"name"`
	On     bool   `json:"on"`
	Wanted bool   `json:"wanted"`
	Reason string `json:"reason,omitempty"` // why it is off
}

// NetBytes are bytes.
type NetBytes struct {
	Received      uint64 `json:"received"`
	Transmitted   uint64 `json:"transmitted"`
	Retransmitted uint64 `json:"retransmitted,omitempty"`
}

// NetTotal is what passed of one kind.
type NetTotal struct {
	Class     string `json:"class"`
	Locality  string `json:"locality"`
	Transport string `json:"transport"`
	NetBytes
}

// NetOwner is what one owner moved of one kind.
type NetOwner struct {
	Pod       string `json:"pod,omitempty"` // namespace/name, where it is known
	PodUID    string `json:"podUID,omitempty"`
	Container string `json:"container,omitempty"`
	Unit      string `json:"unit,omitempty"` // of what is no pod
	Class     string `json:"class"`
	Locality  string `json:"locality"`
	Transport string `json:"transport"`
	NetBytes
}

// NetLive is how connections that serve requests fared in the last interval;
// round trips in seconds.
type NetLive struct {
	Connections int     `json:"connections"`
	P50         float64 `json:"p50"`
	P90         float64 `json:"p90"`
}

// SortOwners puts those first that moved the most.
func SortOwners(owners []NetOwner) {
	slices.SortFunc(owners, func(a, b NetOwner) int {
		return cmp.Or(
			cmp.Compare(b.Received+b.Transmitted, a.Received+a.Transmitted), cmp.Compare(a.PodUID, b.PodUID), cmp.Compare(a.Container, b.Container),
			cmp.Compare(a.Unit, b.Unit), cmp.Compare(a.Class, b.Class), cmp.Compare(a.Locality, b.Locality), cmp.Compare(a.Transport, b.Transport),
		)
	})
}

type scaleOutList struct {
	ScaleOuts []scaleout.Record `json:"scaleouts"`
}

// ofNetwork is a call about the network: this process answers it where it
// watches it.
func (a *api) ofNetwork(call http.HandlerFunc) http.Handler {
	switch {
	case a.opts.Network != nil:
		return call
	case a.opts.Pass != nil:
		return a.opts.Pass
	}
	return http.HandlerFunc(unknownCall)
}

func (a *api) network(w http.ResponseWriter, _ *http.Request) { answer(w, a.opts.Network()) }

// scaleOuts answers all records, or the one that the parameter id names, with
// its course.
func (a *api) scaleOuts(w http.ResponseWriter, r *http.Request) {
	list := a.opts.ScaleOuts()
	id := r.URL.Query().Get("id")
	if id == "" {
		for i := range list {
			list[i].Series = nil
		}
		answer(w, scaleOutList{list})
		return
	}
	for _, record := range list {
		if record.ID == id {
			answer(w, scaleOutList{[]scaleout.Record{record}})
			return
		}
	}
	fail(w, &Error{
		Code: CodeNotFound, Status: http.StatusNotFound, Message: "no scale-out " + id,
		Hint: "the last 64 are kept, until the agent ends: `hearth scaleouts` lists them",
	})
}

// Network asks who moved bytes over the node's network.
func (c *Client) Network(ctx context.Context) (Network, error) {
	return get[Network](ctx, c, "/v1/network")
}

// ScaleOuts asks for the scale-outs of the node, those that run first and then
// the latest, without their course.
func (c *Client) ScaleOuts(ctx context.Context) ([]scaleout.Record, error) {
	list, err := get[scaleOutList](ctx, c, "/v1/scaleouts")
	return list.ScaleOuts, err
}

// ScaleOut asks for one scale-out with its course.
func (c *Client) ScaleOut(ctx context.Context, id string) (scaleout.Record, error) {
	list, err := get[scaleOutList](ctx, c, "/v1/scaleouts?id="+url.QueryEscape(id))
	switch {
	case err != nil:
		return scaleout.Record{}, err
	case len(list.ScaleOuts) != 1:
		return scaleout.Record{}, fmt.Errorf("read agent answer: %d scale-outs where one was asked for", len(list.ScaleOuts))
	}
	return list.ScaleOuts[0], nil
}
