package tidy

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/cmd/hearth/cli"
	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
)

// pages are what a newcomer reads; what they name must exist.
var pages = []string{"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/configuration.md", "docs/engines.md", "docs/lmcache.md"}

var (
	fenced = regexp.MustCompile("(?ms)^```[a-z]*\n(.*?)^```")
	inline = regexp.MustCompile("`([^`\n]+)`")
	target = regexp.MustCompile(`(?m)^([a-z][a-z0-9-]*):`)
	link   = regexp.MustCompile(`\]\(([^)#\s]+)`)
)

// commandsIn gives the shell lines of a page: fenced lines and inline code.
func commandsIn(text string) []string {
	var lines []string
	for _, block := range fenced.FindAllStringSubmatch(text, -1) {
		lines = append(lines, strings.Split(block[1], "\n")...)
	}
	for _, code := range inline.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
		lines = append(lines, code[1])
	}
	return lines
}

func TestMakeTargetsNamedInThePagesExist(t *testing.T) {
	t.Parallel()
	var targets []string
	for _, match := range target.FindAllStringSubmatch(page(t, "Makefile"), -1) {
		targets = append(targets, match[1])
	}
	for _, name := range pages {
		for _, line := range commandsIn(page(t, name)) {
			words := shellWords(line)
			for i, word := range words {
				if word != "make" || i+1 == len(words) {
					continue
				}
				for _, goal := range words[i+1:] {
					if strings.Contains(goal, "=") || goal == "TARGET" {
						continue
					}
					if !slices.Contains(targets, goal) {
						t.Errorf("%s: `%s`: the Makefile has no target %q", name, line, goal)
					}
				}
			}
		}
	}
}

func TestHearthCommandsNamedInThePagesExist(t *testing.T) {
	t.Parallel()
	for _, name := range pages {
		for _, line := range commandsIn(page(t, name)) {
			words := shellWords(line)
			// What comes after it is another command's.
			if end := slices.IndexFunc(words, func(w string) bool { return slices.Contains([]string{"|", "&&", "||"}, w) }); end >= 0 {
				words = words[:end]
			}
			if len(words) < 2 || words[0] != "hearth" && words[0] != "bin/hearth" {
				continue
			}
			if complaint := complaintAbout(t, words[1:]); complaint != "" {
				t.Errorf("%s: `%s`: no such command or flag: %s", name, line, complaint)
			}
		}
	}
}

// complaintAbout tells what hearth has against a command line that is not run,
// empty where it is one.
func complaintAbout(t *testing.T, args []string) string {
	t.Helper()
	run := func(args ...string) (string, string, terminal.Code) {
		var out, complaint bytes.Buffer
		code := cli.Run(t.Context(), args, terminal.Streams{In: strings.NewReader(""), Out: &out, Err: &complaint})
		return out.String(), complaint.String(), code
	}
	if args[0] == "help" && len(args) > 1 {
		// The help on an unknown topic is that on everything.
		topic, complaint, code := run(args...)
		if all, _, _ := run("help"); code != terminal.ExitOK || topic == all {
			return complaint + "the help has no topic " + args[1]
		}
		return ""
	}
	out, complaint, code := run(append(slices.Clone(args), "--help")...)
	if code != terminal.ExitOK {
		return complaint
	}
	// A group shows its own help for a command that it lacks.
	want := "hearth " + args[0]
	if strings.Contains(out, "\n  "+want+" [command]\n") && len(args) > 1 && !strings.HasPrefix(args[1], "-") {
		want += " " + args[1]
	}
	if !strings.Contains(out, "\n  "+want) {
		return "the help does not show " + want
	}
	return ""
}

func TestACommandThatAGroupLacksIsFound(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"models", "lits"}, {"modles", "list"}, {"help", "exit-code"}, {"status", "--jsno"}} {
		if complaintAbout(t, args) == "" {
			t.Errorf("hearth %s passes for a command", strings.Join(args, " "))
		}
	}
}

// shellWords splits a line at spaces outside quotes and stops at a comment.
func shellWords(line string) []string {
	var words []string
	var word strings.Builder
	quote := rune(0)
	begun := false
	flush := func() {
		if begun {
			words = append(words, word.String())
		}
		word.Reset()
		begun = false
	}
	for _, c := range line {
		switch {
		case quote != 0 && c == quote:
			quote = 0
		case quote == 0 && (c == '"' || c == '\''):
			quote, begun = c, true
		case quote == 0 && c == ' ':
			flush()
		case quote == 0 && c == '#' && !begun:
			return words
		default:
			word.WriteRune(c)
			begun = true
		}
	}
	flush()
	return words
}

func TestLinksBetweenPagesLeadSomewhere(t *testing.T) {
	t.Parallel()
	for _, s := range allFiles(t) {
		if !strings.HasSuffix(s.name, ".md") {
			continue
		}
		for _, match := range link.FindAllStringSubmatch(string(s.text), -1) {
			if strings.Contains(match[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(root, s.dir(), match[1])); err != nil {
				t.Errorf("%s: the link to %s leads nowhere", s.name, match[1])
			}
		}
	}
}

func TestEveryMakeTargetIsOneLine(t *testing.T) {
	t.Parallel()
	name, lines := "", 0
	for line := range strings.Lines(page(t, "Makefile") + "end:\n") {
		if match := target.FindStringSubmatch(line); match != nil {
			if name != "" && lines != 1 {
				t.Errorf("make %s has %d lines; call go or a script in one", name, lines)
			}
			name, lines = match[1], 0
			if match[1] != "end" && !strings.Contains(line, "## ") {
				t.Errorf("make %s has no description", name)
			}
		} else if strings.HasPrefix(line, "\t") {
			lines++
		}
	}
}

func TestEveryDirectDependencyHasAReason(t *testing.T) {
	t.Parallel()
	var modules []string
	for _, match := range regexp.MustCompile(`(?m)^\t(\S+) v\S+`).FindAllStringSubmatch(page(t, "go.mod"), -1) {
		modules = append(modules, match[1])
	}
	contributing := page(t, "CONTRIBUTING.md")
	used := map[string]bool{}
	for _, s := range goFiles(t) {
		if !s.rootModule() {
			continue
		}
		for _, imported := range s.imports() {
			if strings.HasPrefix(imported, module) || !strings.Contains(strings.Split(imported, "/")[0], ".") {
				continue
			}
			owner := ""
			for _, m := range modules {
				if (imported == m || strings.HasPrefix(imported, m+"/")) && len(m) > len(owner) {
					owner = m
				}
			}
			if owner == "" {
				t.Errorf("%s: imports %s, which go.mod does not require", s.name, imported)
			}
			used[owner] = true
		}
	}
	for m := range used {
		if !strings.Contains(contributing, "`"+m+"`") {
			t.Errorf("CONTRIBUTING.md: no line says what %s saves", m)
		}
	}
}
