package configfile

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/goccy/go-yaml/token"
)

// maxNesting bounds how deep collections may stand in each other.
const maxNesting = 256

// source is the text being read, for errors that show where.
type source struct {
	name string
	data []byte
}

// fail gives an error at a token, with the lines around it.
func (s source) fail(at *token.Token, message string) error {
	if at == nil || at.Position == nil {
		return fmt.Errorf("%s: %w: %s", s.name, ErrInvalid, message)
	}
	line, column := at.Position.Line, at.Position.Column
	return fmt.Errorf("%s:%d:%d: %w: %s%s", s.name, line, column, ErrInvalid, message, s.excerpt(line, column))
}

// masked is what an excerpt shows in place of what looks like a secret.
const masked = "***"

// secretLine finds an inline secret by the name of its key: no field takes one, so
// it stands in text that is refused.
var secretLine = regexp.MustCompile(`(?i)^(.*(?:token|secret|password|passphrase|apikey)s?"?\s*:\s*)\S.*$`)

// excerpt shows the line, up to two lines on each side, and a caret. Values of
// keys that look like secrets are masked.
func (s source) excerpt(line, column int) string {
	const maxWidth = 160
	lines := strings.Split(string(s.data), "\n")
	if line < 1 || line > len(lines) {
		return ""
	}
	var out strings.Builder
	for n := max(1, line-2); n <= min(len(lines), line+2); n++ {
		text := strings.TrimRight(lines[n-1], "\r")
		if n == len(lines) && text == "" {
			break
		}
		text = secretLine.ReplaceAllString(text, "${1}"+masked)
		if len(text) > maxWidth {
			text = strings.ToValidUTF8(text[:maxWidth], "") + "..."
		}
		mark := " "
		if n == line {
			mark = ">"
		}
		fmt.Fprintf(&out, "\n%s %4d | %s", mark, n, text)
		if n == line && column >= 1 && column <= maxWidth {
			fmt.Fprintf(&out, "\n       | %s^", strings.Repeat(" ", column-1))
		}
	}
	return out.String()
}

// nesting gives an upper bound of how deep the text nests collections, without
// parsing it: the parser recurses once a level and must not be fed more than a
// stack holds.
func nesting(data []byte) int {
	deepest, flow, dashes, indents := 0, 0, 0, 0
	lineStart := true
	column, lastIndent := 0, -1
	for _, c := range data {
		switch {
		case c == '\n':
			lineStart, column, dashes = true, 0, 0
			continue
		case c == '[' || c == '{':
			flow++
		case (c == ']' || c == '}') && flow > 0:
			flow--
		}
		if lineStart && c != ' ' {
			if c == '-' || c == '?' {
				dashes++
			} else {
				lineStart = false
			}
			if column > lastIndent {
				indents = min(indents+1, column+1)
			} else if column < lastIndent {
				indents = min(indents, column+1)
			}
			lastIndent = column
		}
		column++
		deepest = max(deepest, flow+dashes, flow+indents)
	}
	return deepest
}
