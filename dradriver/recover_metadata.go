package dradriver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/hearth-dev/hearth/dradriver/ledger"
)

// metadataFolder is where the kubelet's plugin library keeps the metadata of
// devices, in the driver's own folder: one folder for each claim, named
// <namespace>_<name>.
const metadataFolder = "dra-device-metadata"

// folderOf names a claim's folder there. It is a turn as well: whoever prepares
// or unprepares a claim has it, so that none loses the files of another of the
// same name.
func folderOf(namespace, name string) string { return namespace + "_" + name }

// sweepMetadata removes the library's files of claims that were undone without
// an Unprepare of the kubelet. The library itself removes a claim's files in
// Unprepare only.
func (d *Driver) sweepMetadata(ctx context.Context) error {
	if d.o.CDIDir == "" || d.o.PluginDir == "" {
		return nil
	}
	specs, err := filepath.Glob(filepath.Join(d.o.CDIDir, Name+"_metadata_*.json"))
	// What a killed process was writing.
	torn, tornErr := filepath.Glob(metadataTemp(filepath.Join(d.o.CDIDir, Name+"_metadata_*.json")))
	errs := []error{err, tornErr}
	for _, spec := range append(specs, torn...) {
		// <driver>_metadata_<claim UID>_<request>.json; neither has an underscore.
		name := strings.TrimPrefix(filepath.Base(spec), ".")
		uid, _, _ := strings.Cut(strings.TrimPrefix(name, Name+"_metadata_"), "_")
		errs = append(errs, d.removeUnless(ctx, uid, spec, d.live))
	}
	folders, err := os.ReadDir(filepath.Join(d.o.PluginDir, metadataFolder))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, fmt.Errorf("sweep metadata: %w", err))
	}
	if len(d.o.Ledger.Unsettled()) == 0 { // a damaged entry does not tell its claim's name
		for _, folder := range folders {
			errs = append(errs, d.removeUnless(ctx, folder.Name(), filepath.Join(d.o.PluginDir, metadataFolder, folder.Name()), d.named))
		}
	}
	return errors.Join(errs...)
}

// named reports whether a folder is of a claim that the ledger knows.
func (d *Driver) named(folder string) bool {
	return slices.ContainsFunc(d.o.Ledger.Entries(), func(e ledger.Entry) bool { return folderOf(e.Namespace, e.Name) == folder })
}

// removeUnless removes what is of nobody, in its turn.
func (d *Driver) removeUnless(ctx context.Context, turn, path string, wanted func(string) bool) error {
	if wanted(turn) {
		return nil
	}
	return d.inTurn(ctx, turn, func(context.Context, string) error {
		if wanted(turn) {
			return nil
		}
		return os.RemoveAll(path)
	})
}
