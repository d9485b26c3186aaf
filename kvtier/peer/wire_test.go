package peer

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

// golden are frames whose bytes are in testdata/v1.txt and, of version 2, v2.txt.
func golden() map[string][]byte {
	space := block.Namespace{0: 1, 15: 16}
	first, second := block.Key{Hash: block.HashOf([]byte("a"))}, block.Key{Hash: block.HashOf([]byte("b")), Group: 0x01020304}
	data := []byte("the bytes of a block")
	return map[string][]byte{
		"hello":  hello{1, 1}.append(nil),
		"has":    request{kindHas, 1, space, []entry{{key: first}, {key: second}}}.append(nil),
		"get":    request{kindGet, 2, space, []entry{{first, 20}, {second, block.MaxSize}}}.append(nil),
		"sizes":  appendSizes(nil, 1, []int{20, 0, block.MaxSize}),
		"block":  append(head{kindBlock, 0, 2, first, 20, xxh3.Hash128(data).Bytes()}.append(nil), data...),
		"absent": head{kindAbsent, 1, 2, second, 0, [16]byte{}}.append(nil),
		"hello2": hello{1, 2}.append(nil),
		"child":  append(appendParent(head{kindChild, 0, 2, second, 20, xxh3.Hash128(data).Bytes()}.append(nil), first), data...),
	}
}

func TestFramesHaveTheBytesOfTheProtocol(t *testing.T) {
	t.Parallel()
	frames := golden()
	for _, file := range []string{"testdata/v1.txt", "testdata/v2.txt"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			name, want, _ := strings.Cut(strings.TrimSpace(line), " ")
			if got := hex.EncodeToString(frames[name]); got != want {
				t.Errorf("%s is\n%s, want\n%s", name, got, want)
			}
			delete(frames, name)
		}
	}
	for name, data := range frames {
		t.Errorf("testdata lacks %s %x", name, data)
	}
}

func TestFramesAreReadAsTheyWereWritten(t *testing.T) {
	t.Parallel()
	frames := golden()
	if h, err := parseHello(frames["hello"]); err != nil || h != (hello{1, 1}) {
		t.Error(h, err)
	}
	for _, name := range []string{"has", "get"} {
		r, err := parseRequest(frames[name], nil)
		if err != nil || !bytes.Equal(r.append(nil), frames[name]) {
			t.Errorf("%s is read as %+v, %v", name, r, err)
		}
	}
	sizes := make([]int, 3)
	if err := parseSizes(frames["sizes"], 1, sizes); err != nil || sizes[0] != 20 || sizes[1] != 0 || sizes[2] != block.MaxSize {
		t.Error(sizes, err)
	}
	if parent, err := parseParent(frames["child"][blockSize : blockSize+parentSize]); err != nil || parent.Hash != block.HashOf([]byte("a")) {
		t.Error(parent, err)
	}
	for _, name := range []string{"block", "absent", "child"} {
		h, err := parseHead(frames[name][:blockSize])
		if err != nil || !bytes.Equal(h.append(nil), frames[name][:blockSize]) {
			t.Errorf("%s is read as %+v, %v", name, h, err)
		}
	}
}

func TestRequestsThatCannotBeAreRefused(t *testing.T) {
	t.Parallel()
	space := block.Namespace{1}
	many := make([]entry, MaxKeys+1)
	for what, r := range map[string]request{
		"no entry":                 {kindHas, 1, space, nil},
		"too many":                 {kindHas, 1, space, many},
		"a length in has":          {kindHas, 1, space, []entry{{keyOf(1), 1}}},
		"no length in get":         {kindGet, 1, space, []entry{{keyOf(1), 0}}},
		"too long a block":         {kindGet, 1, space, []entry{{keyOf(1), block.MaxSize + 1}}},
		"a kind that is an answer": {kindSizes, 1, space, []entry{{keyOf(1), 1}}},
	} {
		if _, err := parseRequest(r.append(nil), nil); !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestACallerWhoBreaksTheProtocolIsClosed(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	right := request{kindHas, 1, giver.ID(), []entry{{key: keyOf(1)}}}
	turned := right.append(nil)
	turned[requestSize+3] ^= 1
	second := right
	second.number = 2
	for _, data := range [][]byte{turned, second.append(nil), {9, 0, 1, 0}, {1, 0, 255, 255}} {
		c := call(t, giver)
		c.send(append(data, make([]byte, max(0, requestSize-len(data)))...))
		c.ended()
	}
	giver.end()
	if s := giver.server.Stats(); s.Protocol != 4 || s.NotFound != 0 || s.Connections != 0 {
		t.Errorf("%+v", s)
	}
}

func FuzzDecodersTakeAnyBytes(f *testing.F) {
	for _, data := range golden() {
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) >= helloSize {
			if h, err := parseHello(data[:helloSize]); err == nil && !bytes.Equal(h.append(nil), data[:helloSize]) {
				t.Errorf("hello %+v has other bytes", h)
			}
		}
		if len(data) >= requestSize {
			if r, err := parseRequest(data, nil); err == nil && !bytes.Equal(r.append(nil), data) {
				t.Errorf("request %+v has other bytes", r)
			}
		}
		if len(data) >= hasSize {
			sizes := make([]int, (len(data)-hasSize)/4)
			number := order.Uint32(data[4:])
			if err := parseSizes(data, number, sizes); err == nil && !bytes.Equal(appendSizes(nil, number, sizes), data) {
				t.Errorf("sizes %v have other bytes", sizes)
			}
		}
		if len(data) >= blockSize {
			if h, err := parseHead(data[:blockSize]); err == nil && !bytes.Equal(h.append(nil), data[:blockSize]) {
				t.Errorf("header %+v has other bytes", h)
			}
		}
		if len(data) >= parentSize {
			if parent, err := parseParent(data[:parentSize]); err == nil && !bytes.Equal(appendParent(nil, parent), data[:parentSize]) {
				t.Errorf("parent %+v has other bytes", parent)
			}
		}
	})
}

// FuzzAServerTakesAnyBytes sends bytes after the hello; sums are made right where
// the bytes ask for it, so that more than the check of sums is met.
func FuzzAServerTakesAnyBytes(f *testing.F) {
	cache, err := kvtier.OpenCache(kvtier.CacheOptions{Dir: f.TempDir(), Memory: units.MiB})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = cache.Close() })
	n := addTenant(f, cache, kvtier.TenantSpec{Name: "a", Memory: units.MiB})
	store(f, n, keyOf(1), content(1, 100))
	s := NewServer(ServerOptions{})
	s.Share(n.Tenant())
	f.Add(true, request{kindHas, 1, n.ID(), []entry{{key: keyOf(1)}}}.append(nil))
	f.Add(true, request{kindGet, 1, n.ID(), []entry{{keyOf(1), 100}, {keyOf(2), 100}}}.append(nil))
	f.Add(false, []byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, whole bool, data []byte) {
		if whole && len(data) >= requestSize+entrySize {
			data = data[:requestSize+(len(data)-requestSize)/entrySize*entrySize]
			order.PutUint16(data[2:], uint16((len(data)-requestSize)/entrySize))
			order.PutUint64(data[24:], summed(data[:24], data[requestSize:]))
		}
		ours, theirs := net.Pipe()
		done := make(chan struct{})
		go func() {
			defer close(done)
			s.serve(context.Background(), theirs)
		}()
		go func() {
			_, _ = ours.Write(append(hello{lowest, Version}.append(nil), data...))
			_ = ours.Close()
		}()
		answer := make([]byte, 64<<10)
		for {
			if _, err := ours.Read(answer); err != nil {
				break
			}
		}
		<-done
		if used := s.Stats().Connections; used != 0 {
			t.Errorf("%d connections are left", used)
		}
	})
}
