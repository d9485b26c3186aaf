package block

import (
	"errors"
	"strings"
	"testing"
)

// The identifiers are those that another implementation gives: Python's json with
// sorted keys and without white space, and hashlib.
var vectors = []struct {
	identity  Identity
	canonical string
	id        string
}{
	{
		Identity{
			Tenant: "claim 0b1c", Artifact: "sha256:ab", DType: "bfloat16", Format: "vllm rows <1>", Engine: "vllm 0.33", BlockTokens: 16,
			Groups: []string{"full", "sliding 128"}, Parallel: "tp8 pp1", Hash: "sha256",
		},
		`{"artifact":"sha256:ab","blockTokens":16,"dtype":"bfloat16","engine":"vllm 0.33","format":"vllm rows <1>","groups":["full","sliding 128"],"hash":"sha256","parallel":"tp8 pp1","seed":"","tenant":"claim 0b1c"}`,
		"7ebb0daa1e43c89154db5388803e611c",
	},
	{
		Identity{Tenant: "credential lm", Format: "resp 1", Hash: "sha256"},
		`{"artifact":"","blockTokens":0,"dtype":"","engine":"","format":"resp 1","groups":[],"hash":"sha256","parallel":"","seed":"","tenant":"credential lm"}`,
		"8b5a5916f84da6105290443b9c79129d",
	},
}

func TestAnIdentityHasTheIdentifierOfItsCanonicalForm(t *testing.T) {
	t.Parallel()
	for _, v := range vectors {
		text, err := v.identity.Canonical()
		if err != nil || string(text) != v.canonical {
			t.Errorf("canonical form %s, %v; want %s", text, err, v.canonical)
		}
		if id, err := v.identity.ID(); err != nil || id.String() != v.id {
			t.Errorf("identifier %s, %v; want %s", id, err, v.id)
		}
	}
}

func TestEveryFieldOfAnIdentityCounts(t *testing.T) {
	t.Parallel()
	base := vectors[0].identity
	seen := map[Namespace]string{}
	for name, change := range map[string]func(*Identity){
		"nothing":  func(*Identity) {},
		"tenant":   func(i *Identity) { i.Tenant = "claim 0b1d" },
		"artifact": func(i *Identity) { i.Artifact = "sha256:ac" },
		"dtype":    func(i *Identity) { i.DType = "fp8" },
		"format":   func(i *Identity) { i.Format = "vllm rows <2>" },
		"engine":   func(i *Identity) { i.Engine = "vllm 0.34" },
		"tokens":   func(i *Identity) { i.BlockTokens = 32 },
		"groups":   func(i *Identity) { i.Groups = []string{"sliding 128", "full"} },
		"parallel": func(i *Identity) { i.Parallel = "canonical" },
		"hash":     func(i *Identity) { i.Hash = "sha256_cbor" },
		"seed":     func(i *Identity) { i.Seed = "0" },
	} {
		i := base
		change(&i)
		id, err := i.ID()
		if err != nil {
			t.Fatal(err)
		}
		if other, taken := seen[id]; taken {
			t.Errorf("%s and %s have one identifier", name, other)
		}
		seen[id] = name
	}
}

func TestAnIdentityThatCannotBeIsRefused(t *testing.T) {
	t.Parallel()
	for name, i := range map[string]Identity{
		"no tenant": {Format: "x"}, "negative": {Tenant: "t", BlockTokens: -1}, "too long": {Tenant: "t", Format: strings.Repeat("x", maxIdentity)},
	} {
		if _, err := i.ID(); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestTheHashOfAClientsKeyIsItsSHA256(t *testing.T) {
	t.Parallel()
	const want = "ac07a7bf2de6f508f4b277e21e3efa03791be80b70facb09cfb61b10ffa3b7b7"
	if got := HashOf([]byte("vllm@test@1@0@-359a7f@half")).String(); got != want {
		t.Errorf("hash %s, want %s", got, want)
	}
}

func TestNamesAreReadAsTheyAreWritten(t *testing.T) {
	t.Parallel()
	h := HashOf([]byte("a"))
	if got, err := ParseHash(h.String()); err != nil || got != h {
		t.Errorf("hash %s, %v", got, err)
	}
	id, err := vectors[0].identity.ID()
	if err != nil {
		t.Fatal(err)
	}
	if got, err := ParseNamespace(id.String()); err != nil || got != id {
		t.Errorf("namespace %s, %v", got, err)
	}
	if got := (Key{Hash: h}).String(); got != h.String() {
		t.Errorf("key %s", got)
	}
	if got := (Key{Hash: h, Group: 3}).String(); got != h.String()+":3" {
		t.Errorf("key %s", got)
	}
	for _, bad := range []string{"", "00", strings.Repeat("0", 63), strings.Repeat("g", 64), strings.Repeat("0", 66), strings.Repeat("z", 32)} {
		if _, err := ParseHash(bad); !errors.Is(err, ErrInvalid) {
			t.Errorf("hash %q: %v", bad, err)
		}
		if _, err := ParseNamespace(bad); !errors.Is(err, ErrInvalid) {
			t.Errorf("namespace %q: %v", bad, err)
		}
	}
}
