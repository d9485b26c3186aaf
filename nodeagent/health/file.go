package health

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/durable"
)

// StateVersion is the version of the state file that this package writes and
// the highest it reads.
const StateVersion = 1

// Limits of the state file.
const (
	maxFileBytes = 4 << 20
	maxDevices   = 256
)

// ErrNewer says that the state file is of a newer version: it is left as it is.
var ErrNewer = errors.New("state file is newer than this program")

// errBad says that a state file cannot be understood.
var errBad = errors.New("malformed state file")

// stored is the content of the state file.
type stored struct {
	Version int                 `json:"version"`
	BootID  string              `json:"bootID"`
	Devices map[device.ID]state `json:"devices"`
}

// load reads the state file; an absent one is empty.
func load(files durable.FS, path string) (stored, error) {
	empty := stored{Version: StateVersion, Devices: map[device.ID]state{}}
	file, err := files.OpenFile(path, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return empty, nil
	}
	if err != nil {
		return empty, fmt.Errorf("open health state: %w", err)
	}
	defer func() { _ = file.Close() }()
	data, err := io.ReadAll(io.LimitReader(file, maxFileBytes+1))
	if err != nil {
		return empty, fmt.Errorf("read health state: %w", err)
	}
	return decode(data)
}

// decode reads the bytes of a state file. Errors wrap ErrNewer or errBad.
func decode(data []byte) (stored, error) {
	s := stored{}
	if len(data) > maxFileBytes {
		return s, fmt.Errorf("read health state: %w: past %d bytes", errBad, maxFileBytes)
	}
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return s, fmt.Errorf("read health state: %w: %w", errBad, err)
	}
	if head.Version > StateVersion {
		return s, fmt.Errorf("read health state: %w: version %d, this program reads up to %d", ErrNewer, head.Version, StateVersion)
	}
	if head.Version < 1 {
		return s, fmt.Errorf("read health state: %w: version %d", errBad, head.Version)
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return s, fmt.Errorf("read health state: %w: %w", errBad, err)
	}
	if len(s.Devices) > maxDevices {
		return s, fmt.Errorf("read health state: %w: %d devices", errBad, len(s.Devices))
	}
	for id, st := range s.Devices {
		for key, c := range st.Conditions {
			if key != c.Key || !knownCondition(key) || c.Clear > clearByHand {
				return s, fmt.Errorf("read health state: %w: device %.64q has condition %.64q", errBad, id, key)
			}
		}
	}
	if s.Devices == nil {
		s.Devices = map[device.ID]state{}
	}
	return s, nil
}

func save(files durable.FS, path, bootID string, devices map[device.ID]state) error {
	data, err := json.MarshalIndent(stored{Version: StateVersion, BootID: bootID, Devices: maps.Clone(devices)}, "", " ")
	if err != nil {
		return fmt.Errorf("write health state: %w", err)
	}
	if err := durable.WriteFile(files, path, append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("write health state: %w", err)
	}
	return nil
}
