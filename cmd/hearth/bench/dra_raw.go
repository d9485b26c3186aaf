package bench

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/hearth-dev/hearth/durable"
)

// rawRecord is how long each file of rawCall is, about as those of a claim.
const rawRecord = 2000

// rawCalls makes the files of a call for claims of a shape, with nothing around:
// what the drive takes for them. It gives the ms of each call, and those of its
// fsyncs. No file stays.
func rawCalls(dir, cdi string, s shape, calls int) (whole, syncs []float64, err error) {
	for range calls {
		took, waited, err := rawCall(dir, cdi, s)
		if err != nil {
			return nil, nil, fmt.Errorf("write raw files: %w", err)
		}
		whole, syncs = append(whole, ms(took)), append(syncs, ms(waited))
	}
	return whole, syncs, nil
}

// rawCall begins the entries of the ledger, writes a CDI file for each claim,
// commits, and writes the metadata and its CDI file for each request.
func rawCall(dir, cdi string, s shape) (took, waited time.Duration, err error) {
	record := make([]byte, rawRecord)
	requests := 1
	if s.stock {
		requests = 3
	}
	begin := time.Now()
	files, names := make([]durable.File, s.claims), make([]string, s.claims)
	defer func() {
		for i, f := range files {
			if f != nil {
				err = errors.Join(err, f.Close(), os.Remove(names[i]), os.RemoveAll(names[i]+".d"), os.Remove(rawCDI(cdi, i)))
				for j := range requests {
					err = errors.Join(err, os.Remove(rawCDI(cdi, i, j)))
				}
			}
		}
	}()
	for i := range files {
		names[i] = filepath.Join(dir, fmt.Sprint(i))
		if files[i], err = durable.OS.OpenFile(durable.TempName(names[i]), os.O_CREATE|os.O_RDWR, 0o600); err != nil {
			return 0, 0, err
		}
		if _, err := files[i].Write(record); err != nil {
			return 0, 0, err
		}
	}
	if waited, err = syncTogether(files); err != nil {
		return 0, 0, err
	}
	for i, f := range files {
		if err := durable.OS.Rename(f.Name(), names[i]); err != nil {
			return 0, 0, err
		}
	}
	since := time.Now()
	if err := durable.OS.SyncDir(dir); err != nil {
		return 0, 0, err
	}
	waited += time.Since(since)
	for i, f := range files {
		if err := replaced(rawCDI(cdi, i), record); err != nil {
			return 0, 0, err
		}
		if _, err := f.Write(record); err != nil {
			return 0, 0, err
		}
	}
	again, err := syncTogether(files)
	if err != nil {
		return 0, 0, err
	}
	for i := range files {
		for j := range requests {
			folder := filepath.Join(names[i]+".d", fmt.Sprint(j))
			if err := os.MkdirAll(folder, 0o750); err != nil {
				return 0, 0, err
			}
			if err := errors.Join(replaced(filepath.Join(folder, "metadata.json"), record), replaced(rawCDI(cdi, i, j), record)); err != nil {
				return 0, 0, err
			}
		}
	}
	return time.Since(begin), waited + again, nil
}

// rawCDI is the CDI file of a claim, or of one of its requests.
func rawCDI(dir string, of ...int) string { return filepath.Join(dir, fmt.Sprintf("raw%v", of)) }

// replaced writes a file beside and renames it, as one that is made again after
// a crash.
func replaced(path string, data []byte) error {
	if err := os.WriteFile(path+".tmp", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// syncTogether syncs files side by side.
func syncTogether(files []durable.File) (time.Duration, error) {
	begin := time.Now()
	outcome := make(chan error, len(files))
	for _, f := range files {
		go func() { outcome <- f.Datasync() }()
	}
	var errs []error
	for range files {
		errs = append(errs, <-outcome)
	}
	return time.Since(begin), errors.Join(errs...)
}
