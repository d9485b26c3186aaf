package kvtier

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/index"
)

func TestATenantsRecordIsReadAndWrittenAsStored(t *testing.T) {
	t.Parallel()
	golden, err := os.ReadFile("testdata/tenant_v1.json")
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodeTenant(golden, TenantCredential, "chat")
	if err != nil {
		t.Fatal(err)
	}
	want := tenantRecord{
		Version: 1, Kind: TenantCredential, Name: "chat", Salt: strings.Repeat("0123456789abcdef", 4), Namespaces: []block.Identity{},
	}
	want = want.with(block.Identity{Tenant: "credential chat", Format: "resp 1", Hash: "sha256"})
	want = want.with(block.Identity{
		Tenant: "credential chat", Artifact: "sha256:00", DType: "bf16", Format: "native 1", Engine: "vllm 0.33",
		BlockTokens: 16, Groups: []string{"full"}, Parallel: "tp8 pp1", Hash: "sha256", Seed: "00",
	})
	if !reflect.DeepEqual(got, want) {
		t.Errorf("the stored record is %+v, want %+v", got, want)
	}
	if again, err := json.MarshalIndent(got, "", " "); err != nil || string(again)+"\n" != string(golden) {
		t.Errorf("written anew it is %s, %v", again, err)
	}
}

func TestACheckpointIsReadAndWrittenAsStored(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("testdata/checkpoint_v1.hex")
	if err != nil {
		t.Fatal(err)
	}
	golden, err := hex.DecodeString(strings.ReplaceAll(string(text), "\n", ""))
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodeCheckpoint(golden)
	if err != nil {
		t.Fatal(err)
	}
	want := checkpointed{
		seed: 0x0807060504030201, lastSeq: 1234, segments: []covered{{7, 1, 5<<32 | 9}, {3, 0, 5<<32 | 4}},
		namespaces: []block.Namespace{{1, 2}, {3}},
		entries: []saved{
			{print: index.Print{1, 2, 3, 4}, segment: nowhereSaved, size: 4096, space: 1, touches: 31},
			{print: index.Print{5, 6, 7, 8}, segment: 1, page: 12, size: 65537, parent: 1, space: 1, touches: 2},
			{print: index.Print{9, 10, 11, 12}, segment: 0, page: 1, size: block.MaxSize},
		},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("the stored checkpoint is %+v, want %+v", got, want)
	}
	if again := want.encode(); string(again) != string(golden) {
		t.Errorf("written anew it is %x", again)
	}
}
