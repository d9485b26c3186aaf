// Package kernels boots the kernels that Hearth's nodes have, under QEMU's
// software emulation, and runs compiled Go tests in each. It owns the table of
// kernels and suites, the machine they run in and the reading of what that
// machine says. Its own test with the tag kernels calls it (make kernels); the
// program in init is process 1 of the machine. It never touches this machine's
// kernel: it needs no root and no KVM.
package kernels

// Support is how much of a suite holds on a kernel.
type Support string

// The kinds of support.
const (
	// Full: everything that is tested holds.
	Full Support = "full"
	// Degraded: the kernel lacks something, and what is tested is that Hearth
	// says so and goes on.
	Degraded Support = "degraded"
)

// Suite is one package of tests that every kernel runs.
type Suite struct {
	// Name names the suite's files and lines.
	Name string
	// Package is the package's folder, from the top of the tree. It is compiled
	// without cgo and with the tags root and kernels; its testdata comes along.
	Package string
	// Run has the -test.run pattern for each kind of support. One without does
	// not run the suite.
	Run map[Support]string
}

// Suites are what runs in each kernel, in this order. A test may state the support
// that it found with t.Attr("support", ...); one that is not the table's fails.
// What a test writes into its t.ArtifactDir, the verifier's log for example, is
// kept beside the console.
var Suites = []Suite{
	{
		Name: "probe", Package: "test/kernels/probe",
		Run: map[Support]string{Full: ".", Degraded: "."},
	},
	{
		Name: "bpf", Package: "nodeagent/netattr/bpf",
		Run: map[Support]string{Full: ".", Degraded: "Degraded"},
	},
}

// Kernel is a row of the table: a kernel, where it comes from and what is
// expected of it.
type Kernel struct {
	// Name is the row's: the kernel's series or the suite it is taken from.
	Name string
	// From lists the suites that have it as ARCHIVE:SUITE, with commas.
	From string
	// Package is a regular expression that its package's whole name matches; the
	// newest that does is taken.
	Package string
	// Support is what is expected.
	Support Support
	// Boot has further parameters of the kernel.
	Boot string
	// MayLack says why the suite passes where the package cannot be had; empty
	// where it then fails.
	MayLack string
}

// Table has the kernels, oldest first. Debian's variant for clouds is the same
// source with fewer drivers.
var Table = []Kernel{
	{
		Name: "5.10", From: "debian:bullseye,debian-security:bullseye-security",
		Package: `linux-image-5\.10\.0-[0-9]+-cloud-amd64`, Support: Degraded,
	},
	{
		Name: "5.15", From: "ubuntu:jammy,ubuntu:jammy-updates,ubuntu:jammy-security",
		Package: `linux-image-5\.15\.0-[0-9]+-generic`, Support: Full,
		MayLack: "not every mirror of Debian has Ubuntu",
	},
	{
		Name: "6.1", From: "debian:bookworm,debian-security:bookworm-security",
		Package: `linux-image-6\.1\.0-[0-9]+-cloud-amd64`, Support: Full,
	},
	{
		Name: "6.8", From: "ubuntu:jammy,ubuntu:jammy-updates,ubuntu:jammy-security",
		Package: `linux-image-6\.8\.0-[0-9]+-generic`, Support: Full,
		MayLack: "not every mirror of Debian has Ubuntu",
	},
	{
		Name: "6.12", From: "debian:trixie,debian-security:trixie-security",
		Package: `linux-image-6\.12\.[0-9.]+\+deb13-cloud-amd64`, Support: Full,
	},
	{
		// The strictest that a kernel can be: it lets no program read its memory.
		Name: "6.12-locked", From: "debian:trixie,debian-security:trixie-security",
		Package: `linux-image-6\.12\.[0-9.]+\+deb13-cloud-amd64`, Support: Full, Boot: "lockdown=confidentiality",
	},
	{
		Name: "sid", From: "debian:sid",
		Package: `linux-image-[0-9.]+\+deb[0-9]+-cloud-amd64`, Support: Full,
	},
	{
		Name: "experimental", From: "debian:experimental",
		Package: `linux-image-[0-9.]+(\+deb[0-9]+)?-cloud-amd64`, Support: Full,
		MayLack: "experimental has a kernel only while one is a release candidate",
	},
}

// Plan is what process 1 of the machine reads from PlanPath: what to load and to
// run, in this order.
type Plan struct {
	Modules []string  `json:"modules"` // files in the machine; each needs only those before it
	Suites  []Program `json:"suites"`
}

// Program is a compiled suite in the machine.
type Program struct {
	Name string   `json:"name"`
	Path string   `json:"path"`
	Args []string `json:"args"`
	Env  []string `json:"env"` // besides what every program has
	Out  string   `json:"out"` // folder whose files are sent when the program has ended
}

// PlanPath is where a Plan lies in the machine.
const PlanPath = "/plan.json"

// Record is one line that process 1 writes to the second serial port, as JSON.
type Record struct {
	Kind    string  `json:"kind"`              // one of those below
	Suite   string  `json:"suite,omitempty"`   // of all but booted, broken and done
	Text    string  `json:"text,omitempty"`    // line: a line of its output; broken: why
	Path    string  `json:"path,omitempty"`    // file: relative to the suite's Out
	Data    []byte  `json:"data,omitempty"`    // file: what it holds
	Status  int     `json:"status,omitempty"`  // ended: the exit status, 255 where a signal ended it
	Seconds float64 `json:"seconds,omitempty"` // booted: since the kernel's start; ended: the suite's run time
	Release string  `json:"release,omitempty"` // booted: uname -r
	BTF     bool    `json:"btf,omitempty"`     // booted: whether the kernel describes its types
}

// The kinds of records.
const (
	KindBooted = "booted"
	KindLine   = "line"
	KindFile   = "file"
	KindEnded  = "ended"
	KindDone   = "done"
	KindBroken = "broken"
)
