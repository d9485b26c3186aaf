package dradriver

import (
	"os"
	"path/filepath"
	"testing"
)

func TestMetadataThatAKilledProcessWasWritingIsSweptOnceItsClaimIsGone(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := everything()
	r.mustPrepare(t, c)
	torn := func(uid string) string {
		return metadataTemp(filepath.Join(r.dir, "cdi", Name+"_metadata_"+uid+"_gpu.json"))
	}
	for _, path := range []string{torn(string(c.UID)), torn("uid-stranger")} {
		if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r.mustRecover(t)
	if _, err := os.Stat(torn("uid-stranger")); !os.IsNotExist(err) {
		t.Errorf("what was being written for a claim that is gone: %v", err)
	}
	// Of a claim that is there a Prepare may be writing.
	if _, err := os.Stat(torn(string(c.UID))); err != nil {
		t.Error(err)
	}
	r.mustUnprepare(t, c.UID)
	r.mustRecover(t)
	if _, err := os.Stat(torn(string(c.UID))); !os.IsNotExist(err) {
		t.Errorf("what was being written for a claim that was unprepared: %v", err)
	}
}
