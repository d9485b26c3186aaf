package resp

import (
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"github.com/hearth-dev/hearth/kvtier/block"
)

func TestKeysOfLMCacheSayModelRankAndSalt(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("testdata/keys_metadata.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors struct {
		InProcess struct {
			Vectors []struct {
				Model    string `json:"model"`
				WorkerID int    `json:"worker_id"`
				Key      string `json:"key"`
				Layer0   string `json:"layer0"`
				Layer1   string `json:"layer1"`
			} `json:"vectors"`
		} `json:"in_process_keys"`
		Multiprocess struct {
			Vectors []struct {
				Model   string `json:"model"`
				KVRank  string `json:"kv_rank"`
				Salt    string `json:"cache_salt"`
				WireKey string `json:"wire_key"`
			} `json:"vectors"`
		} `json:"mp_object_keys"`
	}
	if err := json.Unmarshal(raw, &vectors); err != nil {
		t.Fatal(err)
	}
	if len(vectors.InProcess.Vectors) == 0 || len(vectors.Multiprocess.Vectors) == 0 {
		t.Fatal("there are no vectors")
	}
	for _, v := range vectors.InProcess.Vectors {
		families := make(map[family]string)
		for _, whole := range []string{v.Key, v.Layer0, v.Layer1, v.Key + "kv_bytes", v.Key + "metadata"} {
			info := parseKey([]byte(whole))
			if info.form != formInProcess || string(info.model) != v.Model || string(info.rank) != fmt.Sprint(v.WorkerID) || info.salt != nil {
				t.Errorf("%s: form %d, model %q, rank %q, salt %q", whole, info.form, info.model, info.rank, info.salt)
			}
			if other, taken := families[info.family()]; taken {
				t.Errorf("%s and %s are one family", whole, other)
			}
			families[info.family()] = whole
		}
	}
	for _, v := range vectors.Multiprocess.Vectors {
		for _, whole := range []string{v.WireKey, "prefix@" + v.WireKey} {
			info := parseKey([]byte(whole))
			if info.form != formMultiprocess || string(info.model) != v.Model || string(info.rank) != v.KVRank || string(info.salt) != v.Salt {
				t.Errorf("%s: form %d, model %q, rank %q, salt %q", whole, info.form, info.model, info.rank, info.salt)
			}
		}
	}
}

// The server's chunk hashes are what tells its keys apart. Prompts that begin alike
// have the same first hashes, and so find each other's blocks.
func TestKeysOfTheMultiprocessServersHashesAreReadAndChained(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("testdata/mp_token_hash.json")
	if err != nil {
		t.Fatal(err)
	}
	var of struct {
		None    string `json:"none_hash"`
		Vectors []struct {
			ID     int      `json:"id"`
			Chunk  int      `json:"chunk_size"`
			Tokens []uint32 `json:"tokens"`
			Prefix *string  `json:"prefix"`
			Hashes []string `json:"hashes"`
		} `json:"vectors"`
	}
	if err := json.Unmarshal(raw, &of); err != nil {
		t.Fatal(err)
	}
	const model, rank = "meta-llama/Llama-3.1-8B-Instruct", "01000100"
	name := func(hash string) string { return model + "@" + rank + "@0@" + hash }
	none := parseKey([]byte(name(of.None)))
	follows := map[string]string{} // hash -> what it begins with: the chunk before it and its tokens
	for _, v := range of.Vectors {
		if len(v.Hashes) != len(v.Tokens)/v.Chunk {
			t.Errorf("vector %d has %d hashes of %d tokens", v.ID, len(v.Hashes), len(v.Tokens))
			continue
		}
		before := of.None
		if v.Prefix != nil {
			before = *v.Prefix
		}
		var o order
		var parent block.Key
		for i, hash := range v.Hashes {
			for _, salt := range []string{"", "tenant-a"} {
				whole := name(hash)
				if salt != "" {
					whole += "@" + salt
				}
				info := parseKey([]byte(whole))
				if info.form != formMultiprocess || string(info.model) != model || string(info.rank) != rank || string(info.salt) != salt {
					t.Errorf("%s: form %d, model %q, rank %q, salt %q", whole, info.form, info.model, info.rank, info.salt)
				}
				if info.family() != none.family() {
					t.Errorf("%s is of another family than its siblings", whole)
				}
			}
			this := fmt.Sprint(before, v.Tokens[i*v.Chunk:(i+1)*v.Chunk])
			if other, known := follows[hash]; known && other != this {
				t.Errorf("%s is of two chunks", hash)
			}
			follows[hash], before = this, hash
			key := block.Key{Hash: block.HashOf([]byte(name(hash)))}
			if got, ok := o.store(none.family(), key); ok != (i > 0) || got != parent {
				t.Errorf("vector %d: chunk %d continues %v, %v", v.ID, i, got, ok)
			}
			parent = key
		}
	}
	if len(follows) < 10 {
		t.Errorf("there are %d chunks", len(follows))
	}
}

func TestAFamilyIsTheKeyWithoutHashSaltAndTags(t *testing.T) {
	t.Parallel()
	for _, same := range [][2]string{
		{"m@8@3@ab@half", "m@8@3@-c0ffee@half"},
		{"m@8@3@ab@half", "m@8@3@ab@half@user%alice@tier%gold"},
		{"m@8@3@ab@half@7", "m@8@3@cd@half@7@user%bob"},
		{"m@8@3@ab@halfkv_bytes", "m@8@3@cd@half@user%bobkv_bytes"},
		{"m@01000100@0@0123456789abcdef", "m@01000100@0@fedcba9876543210@salt"},
	} {
		a, b := parseKey([]byte(same[0])), parseKey([]byte(same[1]))
		if a.family() != b.family() || a.family() == 0 {
			t.Errorf("%s and %s are of two families", same[0], same[1])
		}
	}
	for _, apart := range [][2]string{
		{"m@8@3@ab@half", "n@8@3@ab@half"},
		{"m@8@3@ab@half", "m@8@2@ab@half"},
		{"m@8@3@ab@half", "m@8@3@ab@float"},
		{"m@8@3@ab@half@1", "m@8@3@ab@half@2"},
		{"m@8@3@ab@halfmetadata", "m@8@3@ab@halfkv_bytes"},
		{"m@01000100@0@0123456789abcdef", "m@01000100@1@0123456789abcdef"},
		{"m@01000100@0@0123456789abcdef", "m@02000100@0@0123456789abcdef"},
		{"m@01000100@0@0123456789abcdef", "p@m@01000100@0@0123456789abcdef"},
	} {
		a, b := parseKey([]byte(apart[0])), parseKey([]byte(apart[1]))
		if a.family() == b.family() {
			t.Errorf("%s and %s are one family", apart[0], apart[1])
		}
	}
}

func TestKeysOfOthersHaveNoFamily(t *testing.T) {
	t.Parallel()
	for _, key := range []string{
		"", "@", "@@@@", "@@@@@@@@@@@@@@@@@@", "key:000000000001", "m@8@3@xyz@half", "m@8@3@ab@", "m@8@3@ab", "m@8@3@@half", "m@8@3@-@half",
		"m@8@3@ab@%x", "@8@3@ab@half", "m@01000100@0@short", "m@01000100@zz@0123456789abcdef", "m@01000100@0@0123456789abcdef@salt@more",
		"m@a@0@0123456789abcdef@half",
	} {
		info := parseKey([]byte(key))
		if info.form != formOther || info.family() != 0 {
			t.Errorf("%q has form %d and family %d", key, info.form, info.family())
		}
	}
}

func FuzzAnyKeyIsReadWithoutHarm(f *testing.F) {
	f.Add([]byte("m@8@3@-5@half@0@user%alicekv_bytes"))
	f.Add([]byte("p@m@01000100@ff@0123456789abcdef@t"))
	f.Fuzz(func(t *testing.T, key []byte) {
		before := string(key)
		info := parseKey(key)
		if string(key) != before {
			t.Fatal("the key was changed")
		}
		if (info.form == formOther) != (info.family() == 0) || info.form != formOther && len(info.model) == 0 {
			t.Fatalf("form %d, family %d, model %q", info.form, info.family(), info.model)
		}
	})
}

func TestFamiliesAreForgottenOldestFirst(t *testing.T) {
	t.Parallel()
	var s sizes
	for f := family(1); f <= maxFamilies+10; f++ {
		s.learn(f, int(f), false)
	}
	if len(s.known) != maxFamilies {
		t.Fatalf("%d families are known, not %d", len(s.known), maxFamilies)
	}
	for f := family(1); f <= maxFamilies+10; f++ {
		if size, ok := s.get(f); ok != (f > 10) || ok && size != int(f) {
			t.Fatalf("family %d: %d, %v", f, size, ok)
		}
	}
}

func TestTheOrderOfKeysHintsAtTheBlockBefore(t *testing.T) {
	t.Parallel()
	k := func(n byte) block.Key { return block.Key{Hash: block.Hash{n}} }
	type step struct {
		ask    bool
		family family
		key    byte
		parent byte // of a store; 0 is none
	}
	ask := func(f family, key byte) step { return step{ask: true, family: f, key: key} }
	store := func(f family, key, parent byte) step { return step{family: f, key: key, parent: parent} }
	for name, steps := range map[string][]step{
		"asked in a row":                    {ask(1, 1), ask(1, 2), ask(1, 3), store(1, 2, 1), store(1, 3, 2)},
		"the first of a row continues none": {ask(1, 1), ask(1, 2), store(1, 1, 0), store(1, 2, 1)},
		"stored in a row":                   {store(1, 1, 0), store(1, 2, 1), store(1, 3, 2)},
		"another family":                    {store(1, 1, 0), store(2, 2, 0)},
		"a question ends a row of stores":   {store(1, 1, 0), ask(1, 5), store(1, 2, 0)},
		"the same prefix again":             {ask(1, 1), ask(1, 2), ask(1, 1), ask(1, 2), store(1, 1, 0), store(1, 2, 1)},
		"a store ends a row of questions":   {ask(1, 1), store(1, 1, 0), ask(1, 2), store(1, 2, 0)},
		"a key is never its own parent":     {store(1, 1, 0), store(1, 1, 0)},
		"keys without family give no hint":  {ask(0, 1), ask(0, 2), store(0, 2, 0), store(0, 3, 0)},
		"families that take turns in a row": {ask(1, 1), ask(2, 2), ask(1, 3), store(1, 3, 0)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var o order
			for i, s := range steps {
				if s.ask {
					o.ask(s.family, k(s.key))
					continue
				}
				parent, ok := o.store(s.family, k(s.key))
				if ok != (s.parent != 0) || ok && parent != k(s.parent) {
					t.Fatalf("step %d: parent %v, %v, not %d", i, parent, ok, s.parent)
				}
			}
		})
	}
}

func TestALongRowStillHints(t *testing.T) {
	t.Parallel()
	k := func(n int) block.Key { return block.Key{Hash: block.Hash{byte(n), byte(n >> 8)}} }
	var o order
	for n := 1; n <= 100; n++ {
		o.ask(1, k(n))
	}
	if parent, ok := o.store(1, k(100)); !ok || parent != k(99) {
		t.Errorf("the last of a long row has parent %v, %v", parent, ok)
	}
	if parent, ok := o.store(1, k(85)); ok {
		t.Errorf("the oldest that is known has parent %v, which is not known any more", parent)
	}
}
