package resp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// all reads every command of a stream, and the values of SETs.
func all(r *reader) (commands []string, err error) {
	for {
		cmd, err := r.next()
		switch {
		case errors.Is(err, io.EOF):
			return commands, nil
		case errors.Is(err, errTooLong):
			commands = append(commands, "too long")
			continue
		case err != nil:
			return commands, err
		}
		text := fmt.Sprintf("%q", cmd.args)
		if cmd.streams {
			if cmd.size > 1<<20 {
				return commands, errors.New("the test reads no value as large")
			}
			chunk := make([]byte, cmd.size)
			n := r.buffered(chunk)
			for n < cmd.size {
				got, err := r.source.Read(chunk[n:])
				if n += got; err != nil && n < cmd.size {
					return commands, err
				}
			}
			if err := r.crlf(); err != nil {
				return commands, err
			}
			rest, err := r.rest(cmd.more)
			if errors.Is(err, errTooLong) {
				commands = append(commands, "too long")
				continue
			}
			if err != nil {
				return commands, err
			}
			text += fmt.Sprintf(" <- %q %q", chunk, rest)
		}
		commands = append(commands, text)
	}
}

func TestCommandsAreReadHoweverTheyAreCut(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("k", 9000)
	for name, c := range map[string]struct {
		raw  string
		want []string
	}{
		"an array":                {wire("GET", "k"), []string{`["GET" "k"]`}},
		"a pipeline":              {wire("GET", "k") + wire("PING"), []string{`["GET" "k"]`, `["PING"]`}},
		"inline":                  {"PING\r\n\r\n  GET   k \nECHO x\r\n", []string{`["PING"]`, `["GET" "k"]`, `["ECHO" "x"]`}},
		"empty arrays":            {"*0\r\n*-1\r\n" + wire("PING"), []string{`["PING"]`}},
		"an empty argument":       {wire("ECHO", ""), []string{`["ECHO" ""]`}},
		"binary":                  {wire("ECHO", "\r\n\x00$5\r\n"), []string{`["ECHO" "\r\n\x00$5\r\n"]`}},
		"a set":                   {wire("set", "k", "value"), []string{`["set" "k"] <- "value" []`}},
		"a set with options":      {wire("SET", "k", "v", "EX", "9") + wire("GET", "k"), []string{`["SET" "k"] <- "v" ["EX" "9"]`, `["GET" "k"]`}},
		"an empty set":            {wire("SET", "k", ""), []string{`["SET" "k"] <- "" []`}},
		"a long key":              {wire("GET", long) + wire("PING"), []string{`["GET" "` + long + `"]`, `["PING"]`}},
		"a long key, a set":       {wire("SET", long, "v", "NX"), []string{`["SET" "` + long + `"] <- "v" ["NX"]`}},
		"too many arguments":      {wire(append([]string{"DEL"}, strings.Fields(strings.Repeat("k ", 1024))...)...) + wire("PING"), []string{"too long", `["PING"]`}},
		"too many bytes":          {wire("GET", strings.Repeat("k", 70000)) + wire("PING"), []string{"too long", `["PING"]`}},
		"bytes in sum":            {wire("DEL", strings.Repeat("k", 40000), strings.Repeat("l", 40000), "m") + wire("PING"), []string{"too long", `["PING"]`}},
		"options too long":        {wire("SET", "k", "v", strings.Repeat("o", 70000), "x") + wire("PING"), []string{"too long", `["PING"]`}},
		"a key of a set too long": {wire("SET", strings.Repeat("k", 70000), "v") + wire("PING"), []string{"too long", `["PING"]`}},
	} {
		for _, by := range []string{"whole", "one byte", "half"} {
			t.Run(name+" by "+by, func(t *testing.T) {
				t.Parallel()
				var source io.Reader = strings.NewReader(c.raw)
				switch by {
				case "one byte":
					source = iotest.OneByteReader(source)
				case "half":
					source = iotest.HalfReader(source)
				}
				r := newReader(source)
				got, err := all(r)
				if err != nil || fmt.Sprint(got) != fmt.Sprint(c.want) {
					t.Fatalf("%v: %.300q, not %.300q", err, got, c.want)
				}
				r.done()
				if len(r.buf) != readBuffer {
					t.Errorf("%d bytes are kept for an idle connection, not %d", len(r.buf), readBuffer)
				}
			})
		}
	}
}

func TestWhatBreaksTheFramingEndsTheConnection(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ raw, want string }{
		{"*1\r\n+PING\r\n", "Protocol error: expected '$', got '+'"},
		{"*1\r\n\x01\r\n", "Protocol error: expected '$', got '?'"},
		{"*1\r\n\r\n", "Protocol error: expected '$', got ' '"},
		{"*x\r\n", "Protocol error: invalid multibulk length"},
		{"*01\r\n", "Protocol error: invalid multibulk length"},
		{"*1048577\r\n", "Protocol error: invalid multibulk length"},
		{"*99999999999999999999999\r\n", "Protocol error: invalid multibulk length"},
		{"*" + strings.Repeat("1", 100), "Protocol error: invalid multibulk length"},
		{"*1\r\n$-1\r\n", "Protocol error: invalid bulk length"},
		{"*1\r\n$536870913\r\n", "Protocol error: invalid bulk length"},
		{"*1\r\n$4x\r\nPING\r\n", "Protocol error: invalid bulk length"},
		{"*1\r\n$4\r\nPINGxx", "Protocol error: bulk string without its end"},
		{"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nvxx", "Protocol error: bulk string without its end"},
		{strings.Repeat("x", 5000), "Protocol error: too big inline request"},
		{"PING \"a b\"\r\n", "Protocol error: unbalanced quotes in request"},
	} {
		_, err := all(newReader(strings.NewReader(c.raw)))
		var wrong protocolError
		if !errors.As(err, &wrong) || string(wrong) != c.want {
			t.Errorf("%.60q: %v, not %s", c.raw, err, c.want)
		}
	}
}

func TestLittleIsReadBeforeAuthentication(t *testing.T) {
	t.Parallel()
	for raw, want := range map[string]string{
		wire("SET", "k", strings.Repeat("v", openBulk+1)): "Protocol error: unauthenticated bulk length",
		wire(strings.Fields("a b c d e f g h i j k")...):  "Protocol error: unauthenticated multibulk length",
	} {
		r := newReader(strings.NewReader(raw))
		r.open = true
		_, err := all(r)
		var wrong protocolError
		if !errors.As(err, &wrong) || string(wrong) != want {
			t.Errorf("%.60q: %v, not %s", raw, err, want)
		}
	}
}

// Whatever comes, the reader ends, keeps little, and understands it the same way
// however it was cut.
func FuzzAnyBytesAreReadWithoutHarm(f *testing.F) {
	f.Add([]byte(wire("SET", "k", "v", "EX", "1") + wire("GET", "k")))
	f.Add([]byte("PING\r\n*0\r\n*2\r\n$4\r\nECHO\r\n$3\r\nabc\r\n"))
	f.Add([]byte("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$100000000\r\nabc"))
	f.Add([]byte("*1048576\r\n$1\r\na\r\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		whole := newReader(bytes.NewReader(raw))
		got, err := all(whole)
		if len(whole.buf) > 2*maxCommand {
			t.Fatalf("%d bytes are kept", len(whole.buf))
		}
		cut, cutErr := all(newReader(iotest.OneByteReader(bytes.NewReader(raw))))
		if fmt.Sprint(got) != fmt.Sprint(cut) || fmt.Sprint(err) != fmt.Sprint(cutErr) {
			t.Fatalf("whole %q (%v), byte by byte %q (%v)", got, err, cut, cutErr)
		}
	})
}

func TestNumbersAreReadAsRedisReadsThem(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int64{"0": 0, "7": 7, "-1": -1, "123456789012345678": 123456789012345678} {
		if got, ok := parseInt([]byte(text)); !ok || got != want {
			t.Errorf("%q is %d, %v", text, got, ok)
		}
	}
	for _, text := range []string{"", "-", "+1", "01", "-0", "00", "1 ", " 1", "1.0", "0x1", "1234567890123456789"} {
		if got, ok := parseInt([]byte(text)); ok {
			t.Errorf("%q is %d, and should be none", text, got)
		}
	}
}
