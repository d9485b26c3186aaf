package configfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

type listener struct {
	Address  string `yaml:"address"`
	Insecure bool   `yaml:"insecure"`
}

type example struct {
	Listen  listener            `yaml:"listen"`
	Budget  units.Bytes         `yaml:"budget"`
	Rate    *units.Rate         `yaml:"rate"`
	Timeout units.Duration      `yaml:"timeout"`
	Refs    []artifact.Ref      `yaml:"refs"`
	Pools   map[string]listener `yaml:"pools"`
	Nodes   []listener          `yaml:"nodes"`
	Weight  int                 `yaml:"weight"`
	Token   string              `yaml:"token"`
	Labels  map[string]string   `yaml:"labels"`
}

const head = "apiVersion: hearth.dev/v1alpha1\nkind: ExampleConfig\n"

func TestParseLaysTheFileOverTheDefaults(t *testing.T) {
	t.Parallel()
	got := example{
		Listen: listener{Address: "127.0.0.1:7410", Insecure: true}, Budget: units.GiB,
		Timeout: units.Duration(time.Minute), Weight: 3,
	}
	err := Parse("a.yaml", []byte(head+`
listen:
  address: 127.0.0.1:9
budget: 256MiB
rate: 500MB/s
refs:
  - hub://org/name@v1
  - dir:///models/x
pools:
  a: {address: "x:1"}
nodes:
- address: "y:2"
token: hunter2
labels: {zone: "1"}
`), "ExampleConfig", &got)
	if err != nil {
		t.Fatal(err)
	}
	rate := units.Rate(500_000_000)
	want := example{
		Listen: listener{Address: "127.0.0.1:9", Insecure: true}, Budget: 256 * units.MiB, Rate: &rate,
		Timeout: units.Duration(time.Minute), Weight: 3, Token: "hunter2",
		Refs: []artifact.Ref{
			{Scheme: "hub", Name: "org/name", Revision: "v1"}, {Scheme: "dir", Name: "/models/x"},
		},
		Pools:  map[string]listener{"a": {Address: "x:1"}},
		Nodes:  []listener{{Address: "y:2"}},
		Labels: map[string]string{"zone": "1"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("parsed configuration (-want +got):\n%s", diff)
	}
}

func TestParseAcceptsAHeaderThatTheStructHoldsItself(t *testing.T) {
	t.Parallel()
	var got struct {
		APIVersion string `yaml:"apiVersion"`
		Kind       string `yaml:"kind"`
	}
	if err := Parse("a.yaml", []byte(head), "ExampleConfig", &got); err != nil {
		t.Fatal(err)
	}
	if got.Kind != "ExampleConfig" || got.APIVersion != APIVersion {
		t.Errorf("header = %+v", got)
	}
}

func TestParseErrorsNameThePlaceAndWhatWouldBeRight(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		text string
		want []string
	}{
		"unknown field":     {head + "listn: {}\n", []string{"a.yaml:3:1", "listn: unknown field; did you mean listen?", ">    3 | listn: {}"}},
		"unknown nested":    {head + "listen:\n  port: 3\n", []string{"a.yaml:4:3", "listen.port: unknown field; known here: address, insecure"}},
		"unknown in a list": {head + "nodes:\n- addressx: 3\n", []string{"a.yaml:4:3", "nodes[0].addressx: unknown field; did you mean address?"}},
		"duplicate key":     {head + "budget: 1\nbudget: 2\n", []string{"a.yaml:4:1", "budget"}},
		"duplicate map key": {head + "pools:\n  a: {}\n  a: {}\n", []string{"a.yaml:5:3"}},
		"text value":        {head + "\nbudget: 12XB\n", []string{"a.yaml:4:9", "budget: parse byte count", "512MiB"}},
		"duration":          {head + "timeout: 30\n", []string{"a.yaml:3:10", "timeout:", "250ms"}},
		"ref in a list":     {head + "refs: [http://x]\n", []string{"a.yaml:3:8", "refs[0]:", "hub"}},
		"list for text":     {head + "budget: [1]\n", []string{"budget: want one value"}},
		"word for a number": {head + "weight: many\n", []string{"a.yaml:3:9"}},
		"list for a map":    {head + "listen: [1]\n", []string{"a.yaml:3:"}},
		"wrong kind":        {"apiVersion: hearth.dev/v1alpha1\nkind: RouterConfig\n", []string{"a.yaml:2:7", `kind is "RouterConfig", want "ExampleConfig"`}},
		"wrong version":     {"apiVersion: hearth.dev/v2\nkind: ExampleConfig\n", []string{"a.yaml:1:13", `apiVersion is "hearth.dev/v2", want "hearth.dev/v1alpha1"`}},
		"no kind":           {"apiVersion: hearth.dev/v1alpha1\n", []string{"no kind; want kind: ExampleConfig"}},
		"no version":        {"kind: ExampleConfig\n", []string{"no apiVersion"}},
		"empty":             {"", []string{"empty"}},
		"only comments":     {"# nothing\n", []string{"apiVersion"}},
		"a list":            {"- 1\n", []string{"want fields"}},
		"second document":   {head + "---\n" + head, []string{"a.yaml:4:", "second YAML document"}},
		"alias":             {head + "nodes:\n- &x {address: a}\n- *x\n", []string{"anchors, aliases"}},
		"broken":            {head + "listen: {address: \n", []string{"a.yaml:3:"}},
		"tab":               {head + "listen:\n\taddress: x\n", []string{"a.yaml:"}},
		"deep":              {head + "x: " + strings.Repeat("[", 10_000), []string{"nested deeper"}},
		"deep dashes":       {strings.Repeat("- ", 10_000), []string{"nested deeper"}},
		"too large":         {head + strings.Repeat("# 456789\n", MaxSize/9), []string{"larger than 1048576 bytes"}},
		"a list of budgets": {head + "budget: [1GiB]\n", []string{"budget: want one value"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := Parse("a.yaml", []byte(test.text), "ExampleConfig", &example{})
			if !errors.Is(err, ErrInvalid) {
				t.Fatalf("Parse = %v, want ErrInvalid", err)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error lacks %q:\n%v", want, err)
				}
			}
		})
	}
}

func TestParseErrorsNeverShowAnInlineSecret(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		head + "token: hunter2\nbogus: 1\n",
		head + "token: \"hunter2\"\nweight: x\n",
		head + "token: hunter2\nlisten: {address: \n",
		head + "token: [hunter2]\n",
	} {
		err := Parse("a.yaml", []byte(text), "ExampleConfig", &example{})
		if err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("error of %q = %v", text, err)
		}
	}
}

func TestLoadReadsAFileAndSaysWhichOneIsMissing(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "agent.yaml")
	if err := Load(path, "ExampleConfig", &example{}); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), path) {
		t.Errorf("Load of a missing file = %v", err)
	}
	if err := os.WriteFile(path, []byte(head+"weight: 4\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var got example
	if err := Load(path, "ExampleConfig", &got); err != nil || got.Weight != 4 {
		t.Errorf("Load = %+v, %v", got, err)
	}
}

func TestMarshalWritesUnitsAsPeopleDo(t *testing.T) {
	t.Parallel()
	text, err := Marshal(example{Budget: 256 * units.MiB, Timeout: units.Duration(time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"budget: 256MiB", "timeout: 1s"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("Marshal lacks %q:\n%s", want, text)
		}
	}
}

func TestMarshalOfAnEffectiveConfigurationReadsBack(t *testing.T) {
	t.Parallel()
	rate := units.Rate(7)
	want := example{
		Listen: listener{Address: "a:1"}, Budget: units.GiB, Rate: &rate, Timeout: units.Duration(time.Second),
		Refs: []artifact.Ref{{Scheme: "hub", Name: "o/n", Revision: "main"}}, Pools: map[string]listener{"x": {}},
		Nodes: []listener{{Address: "b:2"}}, Labels: map[string]string{"a": "b"},
	}
	text, err := Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	var got example
	if err := Parse("effective", append([]byte(head), text...), "ExampleConfig", &got); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("round trip (-want +got):\n%s", diff)
	}
}

func TestProblemsListEveryFieldAndStayBounded(t *testing.T) {
	t.Parallel()
	var none Problems
	if err := none.Err(); err != nil {
		t.Errorf("no problems = %v", err)
	}
	var one Problems
	one.Add("budget", "is 0", "want at least 1GiB")
	if err := one.Err(); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "budget: is 0; want at least 1GiB") {
		t.Errorf("one problem = %v", err)
	}
	var many Problems
	for i := range 60 {
		many.Addf(fmt.Sprintf("nodes[%d]", i), "", "address %q is taken", "a")
	}
	if err := many.Err(); many.Len() != 60 || !strings.Contains(err.Error(), "60 problems") || !strings.Contains(err.Error(), "and 10 more") {
		t.Errorf("many problems = %v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(head + "listen: {address: x}\nbudget: 1GiB\nrefs: [hub://a/b]\ntoken: s\n"))
	f.Add([]byte(head + "nodes:\n- address: a\n  insecure: true\npools: {a: {address: |-\n  x}}\n"))
	f.Add([]byte("- [{a: 1}]\n---\n? b\n: &c d\n<<: *c\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		var got example
		if err := Parse("fuzz", data, "ExampleConfig", &got); err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatalf("error does not wrap ErrInvalid: %v", err)
			}
			return
		}
		if _, err := Marshal(got); err != nil {
			t.Fatalf("accepted but not printable: %v", err)
		}
	})
}
