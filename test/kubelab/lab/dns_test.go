package lab

import (
	"bytes"
	"errors"
	"net/netip"
	"strings"
	"testing"
)

// question makes a DNS question of a type.
func question(name string, kind byte) []byte {
	message := []byte{0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}
	for label := range strings.SplitSeq(name, ".") {
		message = append(append(message, byte(len(label))), label...)
	}
	return append(message, 0, 0, kind, 0, 1)
}

func TestANameIsAnsweredWithItsAddresses(t *testing.T) {
	t.Parallel()
	var asked string
	answer, err := answerDNS(question("Router.hearth.svc.cluster.local", 1), func(name string) ([]netip.Addr, error) {
		asked = name
		return []netip.Addr{netip.MustParseAddr("10.96.1.2"), netip.MustParseAddr("10.96.1.3")}, nil
	})
	if err != nil || asked != "router.hearth.svc.cluster.local" {
		t.Fatalf("asked for %q, %v", asked, err)
	}
	if !bytes.Equal(answer[:12], []byte{0xab, 0xcd, 0x85, 0x80, 0, 1, 0, 2, 0, 0, 0, 0}) {
		t.Errorf("the header is % x", answer[:12])
	}
	if !bytes.HasSuffix(answer, []byte{0, 4, 10, 96, 1, 3}) || !bytes.Contains(answer, []byte{0, 4, 10, 96, 1, 2}) {
		t.Errorf("the answer is % x", answer)
	}
}

func TestWhatIsNotThereAndWhatFailsAreToldApart(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		fails  error
		status byte
	}{{"nothing", errNotFound, dnsNoName}, {"broken", errors.New("no API server"), dnsFailed}, {"empty", nil, dnsOK}} {
		answer, _ := answerDNS(question(c.name, 1), func(string) ([]netip.Addr, error) { return nil, c.fails })
		if len(answer) < 8 || answer[3]&0xf != c.status || answer[7] != 0 {
			t.Errorf("%s: % x", c.name, answer)
		}
	}
}

func TestAQuestionOfAnotherTypeHasAnEmptyAnswer(t *testing.T) {
	t.Parallel()
	const typeAAAA = 28
	answer, err := answerDNS(question("router", typeAAAA), func(string) ([]netip.Addr, error) {
		return []netip.Addr{netip.MustParseAddr("10.96.1.2")}, nil
	})
	if err != nil || answer[3]&0xf != dnsOK || answer[7] != 0 {
		t.Errorf("% x, %v", answer, err)
	}
}

func TestAnAnswerFitsIntoADatagram(t *testing.T) {
	t.Parallel()
	many := make([]netip.Addr, 100)
	for i := range many {
		many[i] = netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})
	}
	answer, err := answerDNS(question("router", 1), func(string) ([]netip.Addr, error) { return many, nil })
	if err != nil || len(answer) > dnsMost || answer[7] < 20 {
		t.Errorf("%d bytes with %d addresses, %v", len(answer), answer[7], err)
	}
}

func FuzzNoMessageUpsetsTheNameServer(f *testing.F) {
	f.Add(question("router", 1))
	f.Add([]byte{})
	f.Add(question("router", 1)[:14])
	f.Fuzz(func(t *testing.T, message []byte) {
		answer, err := answerDNS(message, func(string) ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("10.96.1.2")}, nil
		})
		if err != nil || len(answer) > max(dnsMost, len(message)) {
			t.Errorf("%d bytes for %d, %v", len(answer), len(message), err)
		}
	})
}
