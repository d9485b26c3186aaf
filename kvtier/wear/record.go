package wear

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Version is the version of wear.json.
const Version = 1

// maxRecord bounds wear.json, in bytes.
const maxRecord = 4 << 10

var (
	// ErrNewer says that a newer version wrote the file; it is untouched.
	ErrNewer = errors.New("wear record was written by a newer version")
	// ErrUnreadable says that the file is none of ours or damaged. The caller puts
	// it away, for people, and opens again.
	ErrUnreadable = errors.New("wear record cannot be understood")
)

// record is wear.json, in bytes.
type record struct {
	Version int `json:"version"`
	// Written is what was written to the drives when the record was.
	Written int64 `json:"written"`
	// Granted is what the process may have written since, at most.
	Granted int64 `json:"granted"`
	// Credit is what may be written beyond that; below zero what is to come first.
	Credit int64 `json:"credit"`
}

func (r record) encode() ([]byte, error) {
	data, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	return append(data, '\n'), nil
}

// decode reads a record. Errors wrap ErrNewer or ErrUnreadable.
func decode(data []byte) (r record, err error) {
	var version struct {
		Version *int `json:"version"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return r, fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	switch {
	case version.Version == nil || *version.Version < 1:
		return r, fmt.Errorf("%w: it has no version", ErrUnreadable)
	case *version.Version > Version:
		return r, fmt.Errorf("%w: version %d, this code knows %d", ErrNewer, *version.Version, Version)
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&r); err != nil {
		return record{}, fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return record{}, fmt.Errorf("%w: something stands behind it", ErrUnreadable)
	}
	for name, n := range map[string]int64{"written": r.Written, "granted": r.Granted, "credit": r.Credit} {
		if n < 0 && name != "credit" || n < -maxBytes || n > maxBytes {
			return record{}, fmt.Errorf("%w: %s is %d bytes", ErrUnreadable, name, n)
		}
	}
	return r, nil
}
