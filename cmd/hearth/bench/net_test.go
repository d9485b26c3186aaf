package bench

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestAnIntervalIsStudentsOverLogarithmsOfRatios(t *testing.T) {
	t.Parallel()
	near := func(got, want float64) bool { return math.Abs(got-want) < 1e-3 }
	if mean, low, high := interval([]float64{0.98, 0.98, 0.98}); !near(mean, 0.98) || !near(low, 0.98) || !near(high, 0.98) {
		t.Errorf("of one value: %v in %v to %v", mean, low, high)
	}
	if mean, low, high := interval([]float64{0.5, 2}); !near(mean, 1) || low > 0.5 || high < 2 {
		t.Errorf("of two opposites: %v in %v to %v", mean, low, high)
	}
	if mean, low, high := interval([]float64{0.97}); mean != low || mean != high {
		t.Errorf("of one alone: %v in %v to %v", mean, low, high)
	}
	// 30 ratios e^+-0.1: their deviation is 0.1 sqrt(30/29), t is 2.0452.
	var ratios []float64
	for i := range 30 {
		ratios = append(ratios, math.Exp(0.1*float64(1-2*(i%2))))
	}
	half := 2.0452 * 0.1 * math.Sqrt(30./29) / math.Sqrt(30)
	if mean, low, high := interval(ratios); !near(mean, 1) || !near(low, math.Exp(-half)) || !near(high, math.Exp(half)) {
		t.Errorf("of 30: %v in %v to %v, want within e^%v", mean, low, high, half)
	}
	for freedom, want := range map[float64]float64{5: 2.5706, 9: 2.2622, 29: 2.0452, 119: 1.9801} {
		if got := student(freedom); math.Abs(got-want)/want > 0.002 {
			t.Errorf("t of %v is %v, want %v", freedom, got, want)
		}
	}
}

func TestALossCountsOnlyWhereTheWholeIntervalIsBelowTheAim(t *testing.T) {
	t.Parallel()
	for _, of := range []struct {
		name string
		with []float64
		met  bool
	}{
		{"a loss of 5 % in each pair", []float64{95, 95.1, 94.9, 95, 95.1, 94.9}, false},
		{"a loss within the noise", []float64{80, 110, 95, 85, 105, 90}, true},
		{"no loss", []float64{100, 100.1, 99.9, 100, 100.1, 99.9}, true},
	} {
		f := flow{name: "throughput_with", of: 1, with: of.with, without: []float64{100, 100, 100, 100, 100, 100}}
		row := f.row(8)
		if row.Met != of.met || row.Spread[0] > row.Value || row.Value > row.Spread[1] || row.Pairs != 6 {
			t.Errorf("%s: %+v", of.name, row)
		}
	}
}

func TestAPartThatCannotRunSaysWhyInEachOfItsRows(t *testing.T) {
	t.Parallel()
	for _, part := range netParts {
		rows := unmeasured(netTable[part.name], cannot{errors.New("no rights\nat all")})
		if len(rows) == 0 {
			t.Errorf("part %s has no rows", part.name)
		}
		for _, row := range rows {
			if row.Met || row.Note != "not measured: no rights at all" || row.Unit == "" {
				t.Errorf("part %s: %+v", part.name, row)
			}
			if measured := netRow(row.Name); measured.Note != "" || measured.Unit != row.Unit {
				t.Errorf("%s is %+v before it is measured", row.Name, measured)
			}
		}
	}
	cmd := Command()
	cmd.SetArgs([]string{"net", "--only", "walks,nothing"})
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), `"nothing"`) {
		t.Errorf("an unknown part: %v", err)
	}
}

// message is one of sock_diag, with its attributes.
func message(kind uint16, body []byte, attributes ...[]byte) []byte {
	for _, a := range attributes {
		body = append(body, a...)
	}
	raw := make([]byte, unix.SizeofNlMsghdr, unix.SizeofNlMsghdr+len(body))
	binary.NativeEndian.PutUint32(raw, uint32(cap(raw)))
	binary.NativeEndian.PutUint16(raw[4:], kind)
	return append(raw, body...)
}

func attribute(kind uint16, value []byte) []byte {
	raw := make([]byte, unix.SizeofNlAttr, unix.SizeofNlAttr+len(value))
	binary.NativeEndian.PutUint16(raw, uint16(cap(raw)))
	binary.NativeEndian.PutUint16(raw[2:], kind)
	return append(raw, value...)
}

func TestADumpOfSocketsIsReadToItsEnd(t *testing.T) {
	t.Parallel()
	n := binary.NativeEndian
	about, memory := make([]byte, tcpBytesSent+8), make([]byte, 36)
	n.PutUint64(about[tcpBytesReceived:], 7)
	n.PutUint64(about[tcpBytesSent:], 9)
	n.PutUint32(memory[4*memoryOptions:], 168)
	socket := message(sockDiagByFamily, make([]byte, inetDiagMessage), attribute(99, []byte{1}), []byte{0, 0, 0}, attribute(inetDiagInfo, about), attribute(inetDiagMemory, memory))
	var got []diagnosed
	each := func(d diagnosed) { got = append(got, d) }
	if done, err := messages(slices.Concat(socket, socket), each); done || err != nil {
		t.Fatalf("done %t, %v", done, err)
	}
	if done, err := messages(message(unix.NLMSG_DONE, make([]byte, 4)), each); !done || err != nil {
		t.Fatalf("done %t, %v", done, err)
	}
	if want := []diagnosed{{9, 7, 168}, {9, 7, 168}}; !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	for name, raw := range map[string][]byte{
		"cut off":   socket[:len(socket)-1],
		"too small": message(sockDiagByFamily, make([]byte, 8)),
		"no end":    append([]byte{8, 0, 0, 0}, make([]byte, 12)...),
		"no error":  message(unix.NLMSG_ERROR, nil),
		"a refusal": message(unix.NLMSG_ERROR, []byte{0xf3, 0xff, 0xff, 0xff}), // -EACCES
	} {
		if _, err := messages(raw, each); err == nil {
			t.Errorf("%s: no error", name)
		} else if name == "a refusal" && !errors.Is(err, unix.EACCES) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
