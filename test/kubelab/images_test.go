package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestAnImageIsTheSameBytesEachTime(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"program", "extra"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!text "+name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pack := func(archive string) []byte {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "../../scripts/image", "--user", "65532", "--env", `QUOTE="\`,
			"--file", filepath.Join(dir, "extra")+":/etc/deep/extra", "hearth/test", filepath.Join(dir, archive), filepath.Join(dir, "program"), "first", "sec ond")
		if output, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, output)
		}
		text, err := os.ReadFile(filepath.Join(dir, archive))
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	image := pack("first.tar")
	if err := os.Chtimes(filepath.Join(dir, "program"), time.Time{}, time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(image, pack("second.tar")) {
		t.Error("a second run gives other bytes")
	}

	outer := entries(t, image)
	var manifest []struct {
		Config           string
		RepoTags, Layers []string
	}
	if err := json.Unmarshal(outer["manifest.json"], &manifest); err != nil || len(manifest) != 1 {
		t.Fatalf("%s: %v", outer["manifest.json"], err)
	}
	if got := strings.Join(manifest[0].RepoTags, " "); got != "hearth/test:latest" {
		t.Errorf("its name is %q", got)
	}
	var config struct {
		Config struct {
			User            string
			Env, Entrypoint []string
		}
	}
	if err := json.Unmarshal(outer[manifest[0].Config], &config); err != nil {
		t.Fatal(err)
	}
	if config.Config.User != "65532" || strings.Join(config.Config.Env, "|") != `PATH=/usr/bin|QUOTE="\` || strings.Join(config.Config.Entrypoint, "|") != "/usr/bin/program|first|sec ond" {
		t.Errorf("%+v", config)
	}
	inner := entries(t, outer[manifest[0].Layers[0]])
	if string(inner["usr/bin/program"]) != "#!text program" || string(inner["etc/deep/extra"]) != "#!text extra" {
		t.Errorf("the layer holds %v", inner)
	}
}

func TestAnImageOfAProgramThatNeedsLibrariesIsRefused(t *testing.T) {
	t.Parallel()
	output, err := exec.CommandContext(t.Context(), "../../scripts/image", "hearth/test", filepath.Join(t.TempDir(), "x.tar"), "/bin/sh").CombinedOutput()
	if err == nil || !strings.Contains(string(output), "not static") {
		t.Errorf("%v: %s", err, output)
	}
}

// entries reads the files of an archive, whose owners and times must say nothing.
func entries(t *testing.T, archive []byte) map[string][]byte {
	t.Helper()
	found := map[string][]byte{}
	reader := tar.NewReader(bytes.NewReader(archive))
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			t.Fatal(err)
		}
		if header.Uid != 0 || header.Gid != 0 || header.ModTime.Unix() != 0 {
			t.Errorf("%s is of %d:%d at %s", header.Name, header.Uid, header.Gid, header.ModTime)
		}
		text, err := io.ReadAll(reader)
		if err != nil {
			t.Fatal(err)
		}
		found[header.Name] = text
	}
}
