package dradriver

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// metadataFiles replaces how the kubelet's plugin library writes the metadata
// of devices: two files for each request of a claim, each of which the library
// syncs twice, while the kubelet waits. They are written anew in every Prepare,
// which the kubelet calls again after a boot, so a rename is enough.
//
// The library's folder for a claim has the names of namespace and claim in one,
// which may be longer than a file system takes. Such a claim has no metadata,
// and none is there to be removed when it ends.
func metadataFiles() kubeletplugin.MetadataFileOperations {
	return kubeletplugin.MetadataFileOperations{WriteFile: replaceFile, RemoveAll: removeIfNamed}
}

func removeIfNamed(path string) error {
	if err := os.RemoveAll(path); !errors.Is(err, syscall.ENAMETOOLONG) {
		return err
	}
	return nil
}

// replaceFile makes a file data whole, unsynced. Callers have the file to
// themselves.
func replaceFile(name string, data []byte, perm os.FileMode) error {
	temp := metadataTemp(name)
	f, err := os.OpenFile(temp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, perm)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(perm), f.Close()); err == nil {
		err = os.Rename(temp, name)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp))
	}
	return nil
}

// metadataTemp is the path at which a file is written before it is renamed.
func metadataTemp(name string) string {
	return filepath.Join(filepath.Dir(name), "."+filepath.Base(name)+".tmp")
}
