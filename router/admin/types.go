// Package admin owns the router's local API: its JSON types, the handlers that
// the router serves on its socket and its admin listener, and the client that
// the command line uses. It holds no state, changes nothing (every call is a
// question) and never serves metrics. The API is in API.md.
package admin

import (
	"time"

	"github.com/hearth-dev/hearth/router/feed"
	"github.com/hearth-dev/hearth/router/pool"
)

// Version is the version of the API, in the header Hearth-API of each answer.
const Version = "1"

// Status is what a router says of itself.
type Status struct {
	Name      string            `json:"name"`
	Version   string            `json:"version"`
	StartedAt time.Time         `json:"startedAt"`
	Listeners map[string]string `json:"listeners"` // ingress, admin, socket -> address
	Draining  bool              `json:"draining"`
	InFlight  int64             `json:"inFlight"`
	Endpoints int               `json:"endpoints"`
	Models    int               `json:"models"`
	Nodes     []Node            `json:"nodes"`
	Metering  Metering          `json:"metering"`
	Config    Config            `json:"config"`
	Problems  []string          `json:"problems,omitempty"`
}

// Node is the router's stream to one agent.
type Node = feed.NodeStats

// ScaleOut is the summary of a pull on one of the nodes.
type ScaleOut = feed.ScaleOut

// ScaleOuts are those of all nodes, the running ones first and then the latest.
type ScaleOuts struct {
	ScaleOuts []ScaleOut `json:"scaleouts"`
	// More is how many are not among them, at most feed.MaxScaleOuts are.
	More int `json:"more,omitempty"`
}

// Metering is the state of the usage records.
type Metering struct {
	File       string `json:"file,omitempty"`
	Written    uint64 `json:"written"`
	Dropped    uint64 `json:"dropped"`
	Duplicates uint64 `json:"duplicates"`
	Queued     int    `json:"queued"`
}

// Config is the state of the configuration file.
type Config struct {
	File     string    `json:"file,omitempty"`
	LoadedAt time.Time `json:"loadedAt"`
	// Error is why the file as it is now was not taken; the one before serves.
	Error string `json:"error,omitempty"`
}

// Endpoint is one endpoint as requests see it.
type Endpoint = pool.EndpointStats

// Model is one logical model with its targets.
type Model = pool.ModelStats

// Explanation is where a request would go, and why.
type Explanation = pool.Explanation
