// Package terminal owns how a command talks to the person or the program that
// started it: streams, tables, progress, errors with hints, and exit codes. The
// commands under cmd/hearth use it. It knows no component, opens no connection
// and never ends the process.
package terminal

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"text/tabwriter"

	"golang.org/x/term"
)

// Streams are a command's input and outputs. Answers go to Out, everything said
// on the way to Err, so that Out can be piped.
type Streams struct {
	In  io.Reader
	Out io.Writer
	Err io.Writer
}

// Std gives the process's own streams.
func Std() Streams { return Streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr} }

// Interactive reports whether w is a terminal that a person watches.
func Interactive(w io.Writer) bool {
	file, ok := w.(*os.File)
	return ok && term.IsTerminal(int(file.Fd())) && os.Getenv("TERM") != "dumb"
}

// Colour reports whether w may get colour: a terminal, and NO_COLOR is unset or
// empty (no-color.org).
func Colour(w io.Writer) bool { return os.Getenv("NO_COLOR") == "" && Interactive(w) }

// Width is how many columns w has: its terminal's, else 80.
func Width(w io.Writer) int {
	if file, ok := w.(*os.File); ok {
		if columns, _, err := term.GetSize(int(file.Fd())); err == nil && columns > 0 {
			return columns
		}
	}
	return 80
}

// UTF8 reports whether w is a terminal that shows UTF-8, by the locale.
func UTF8(w io.Writer) bool { return Interactive(w) && utf8Locale(os.Getenv) }

// utf8Locale reads the variables of the locale in the order in which they count.
func utf8Locale(getenv func(string) string) bool {
	locale := strings.ToLower(cmp.Or(getenv("LC_ALL"), getenv("LC_CTYPE"), getenv("LANG")))
	return strings.Contains(locale, "utf-8") || strings.Contains(locale, "utf8")
}

// JSON writes v as one indented JSON value and a newline.
func JSON(w io.Writer, v any) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(v); err != nil {
		return fmt.Errorf("write answer: %w", err)
	}
	return nil
}

// Table writes rows under a header, in aligned columns. An empty cell shows as
// "-"; a control character in a cell shows as "?", so that no name read from
// elsewhere can move the cursor.
func Table(w io.Writer, header []string, rows [][]string) error {
	table := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	write := func(cells []string) {
		shown := make([]string, len(cells))
		for i, cell := range cells {
			shown[i] = Plain(cell)
			if cell == "" {
				shown[i] = "-"
			}
		}
		fmt.Fprintln(table, strings.Join(shown, "\t"))
	}
	write(header)
	for _, row := range rows {
		write(row)
	}
	if err := table.Flush(); err != nil {
		return fmt.Errorf("write answer: %w", err)
	}
	return nil
}

// Plain replaces control characters, line ends included, by "?".
func Plain(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return '?'
		}
		return r
	}, s)
}

// Logger gives the log of a long-running command: text on a terminal, JSON
// lines otherwise. level is debug, info, warn or error; anything else is info.
func Logger(w io.Writer, level string) *slog.Logger {
	options := &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Value.Kind() == slog.KindDuration {
			a.Value = slog.StringValue(a.Value.Duration().String()) // JSON has nanoseconds otherwise
		}
		return a
	}}
	var parsed slog.Level
	if parsed.UnmarshalText([]byte(level)) == nil {
		options.Level = parsed
	}
	if Interactive(w) {
		return slog.New(slog.NewTextHandler(w, options))
	}
	return slog.New(slog.NewJSONHandler(w, options))
}
