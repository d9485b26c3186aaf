package configfile

import (
	"fmt"
	"strings"
)

// maxProblems bounds how many problems one Problems keeps.
const maxProblems = 50

// Problems collects what a Validate finds, so that an operator sees all of it
// at once. The zero value is ready to use.
type Problems struct {
	lines   []string
	dropped int
}

// Add notes one problem: the field by its path in the file ("pools[0].url"),
// what is wrong with it, and what would be right (may be empty).
func (p *Problems) Add(field, problem, right string) {
	if len(p.lines) == maxProblems {
		p.dropped++
		return
	}
	line := field + ": " + problem
	if right != "" {
		line += "; " + right
	}
	p.lines = append(p.lines, line)
}

// Addf is Add with a formatted problem.
func (p *Problems) Addf(field, right, format string, args ...any) {
	p.Add(field, fmt.Sprintf(format, args...), right)
}

// Check notes a problem with a field unless ok; the text says what is wrong and
// what would be right ("is 0, want 1 to 64").
func (p *Problems) Check(ok bool, field, format string, args ...any) {
	if !ok {
		p.Add(field, fmt.Sprintf(format, args...), "")
	}
}

// Len gives the number of problems noted.
func (p *Problems) Len() int { return len(p.lines) + p.dropped }

// Err gives nil, or one error that lists every problem and wraps ErrInvalid.
func (p *Problems) Err() error {
	switch {
	case len(p.lines) == 0:
		return nil
	case len(p.lines) == 1:
		return fmt.Errorf("%w: %s", ErrInvalid, p.lines[0])
	}
	text := strings.Join(p.lines, "\n  ")
	if p.dropped > 0 {
		text += fmt.Sprintf("\n  and %d more", p.dropped)
	}
	return fmt.Errorf("%w: %d problems\n  %s", ErrInvalid, p.Len(), text)
}
