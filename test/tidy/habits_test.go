package tidy

import (
	"bytes"
	"go/ast"
	"go/token"
	"slices"
	"strings"
	"testing"
)

func TestNoTestSleepsOrSkips(t *testing.T) {
	t.Parallel()
	for _, s := range goFiles(t) {
		// A conformance suite is a test, although its file is not called one.
		suite := slices.Contains(s.imports(), "testing")
		if !suite && !strings.HasPrefix(s.name, "test/") {
			continue
		}
		// Inside a bubble of synctest a sleep moves the fake clock and takes no time.
		var bubbles []*ast.CallExpr
		calls(s, "testing/synctest", "Test", func(call *ast.CallExpr) { bubbles = append(bubbles, call) })
		calls(s, "time", "Sleep", func(call *ast.CallExpr) {
			if slices.ContainsFunc(bubbles, func(b *ast.CallExpr) bool { return b.Pos() < call.Pos() && call.End() <= b.End() }) {
				return
			}
			t.Errorf("%s: a test sleeps; wait on what it waits for, or use testing/synctest", at(call))
		})
		bareWaits(s, func(call *ast.CallExpr) {
			if slices.ContainsFunc(bubbles, func(b *ast.CallExpr) bool { return b.Pos() < call.Pos() && call.End() <= b.End() }) {
				return
			}
			t.Errorf("%s: a test sleeps by waiting for a timer alone; wait on what it waits for, or use testing/synctest", at(call))
		})
		ast.Inspect(s.syntax, func(node ast.Node) bool {
			call, ok := node.(*ast.CallExpr)
			if !ok {
				return true
			}
			if selector, ok := call.Fun.(*ast.SelectorExpr); ok && suite {
				switch selector.Sel.Name {
				case "Skip", "Skipf", "SkipNow":
					if base, ok := selector.X.(*ast.Ident); ok && slices.Contains([]string{"t", "tb", "b", "f"}, base.Name) {
						t.Errorf("%s: a test skips; make it run, or fail and say what it lacks", at(call))
					}
				}
			}
			return true
		})
	}
}

// bareWaits finds receives from a timer that are no case of a select: sleeps
// by another name. In a select the timer bounds the wait for something else.
func bareWaits(s *source, found func(*ast.CallExpr)) {
	cases := map[ast.Node]bool{}
	ast.Inspect(s.syntax, func(node ast.Node) bool {
		if c, ok := node.(*ast.CommClause); ok && c.Comm != nil {
			ast.Inspect(c.Comm, func(n ast.Node) bool { cases[n] = true; return true })
		}
		return true
	})
	receives := map[ast.Node]bool{}
	ast.Inspect(s.syntax, func(node ast.Node) bool {
		if u, ok := node.(*ast.UnaryExpr); ok && u.Op == token.ARROW && !cases[u] {
			from := u.X
			if selector, ok := from.(*ast.SelectorExpr); ok && selector.Sel.Name == "C" {
				from = selector.X // of a timer made on the spot
			}
			receives[from] = true
		}
		return true
	})
	for _, timer := range []string{"After", "Tick", "NewTimer", "NewTicker"} {
		calls(s, "time", timer, func(call *ast.CallExpr) {
			if receives[call] {
				found(call)
			}
		})
	}
}

func TestOnlyCmdEndsTheProcess(t *testing.T) {
	t.Parallel()
	for _, s := range goFiles(t) {
		program := strings.HasPrefix(s.name, "test/") && s.syntax.Name.Name == "main"
		if s.test() || program || strings.HasPrefix(s.name, "cmd/") {
			continue
		}
		for _, call := range [][2]string{{"os", "Exit"}, {"log", "Fatal"}, {"log", "Fatalf"}, {"log", "Fatalln"}} {
			calls(s, call[0], call[1], func(node *ast.CallExpr) {
				t.Errorf("%s: %s.%s; return an error, only cmd exits", at(node), call[0], call[1])
			})
		}
	}
}

func TestNothingPanicsWithABareString(t *testing.T) {
	t.Parallel()
	for _, s := range goFiles(t) {
		if s.generated() || s.test() {
			continue
		}
		ast.Inspect(s.syntax, func(node ast.Node) bool {
			call, ok := node.(*ast.CallExpr)
			if !ok || len(call.Args) != 1 {
				return true
			}
			name, ok := call.Fun.(*ast.Ident)
			if _, literal := call.Args[0].(*ast.BasicLit); ok && literal && name.Name == "panic" {
				t.Errorf("%s: a bare panic; return an error", at(call))
			}
			return true
		})
	}
}

// maxLines is the length past which a file needs a reason.
const maxLines = 600

// longFor names the files that may be longer, with the reason.
var longFor = map[string]string{}

func TestFilesPastSixHundredLinesHaveAReason(t *testing.T) {
	t.Parallel()
	for _, s := range goFiles(t) {
		if lines := bytes.Count(s.text, []byte("\n")); !s.generated() && lines > maxLines && longFor[s.name] == "" {
			t.Errorf("%s: %d lines; split it, or give the reason in longFor", s.name, lines)
		}
	}
}

// foreign is what belongs to one machine or to the making of the code, and not
// to the code.
var foreign = []struct{ text, reason string }{
	{"/ro" + "ot/", "the path of one machine"},
	{"TO" + "DO", "unfinished; do it or leave it out"},
	{"FIX" + "ME", "unfinished; do it or leave it out"},
}

func TestTheTreeNamesNoMachineAndNothingUnfinished(t *testing.T) {
	t.Parallel()
	for _, s := range allFiles(t) {
		if s.name == "LICENSE" || strings.HasSuffix(s.name, ".sum") {
			continue
		}
		for _, f := range foreign {
			if i := bytes.Index(s.text, []byte(f.text)); i >= 0 {
				t.Errorf("%s:%d: %q: %s", s.name, 1+bytes.Count(s.text[:i], []byte("\n")), f.text, f.reason)
			}
		}
	}
}

func TestEveryServerOfTheProductBoundsTheWaitForABody(t *testing.T) {
	t.Parallel()
	product := []string{"router", "nodeagent", "weightcache", "dradriver"}
	for _, s := range goFiles(t) {
		top, _, _ := strings.Cut(s.name, "/")
		if s.test() || !slices.Contains(product, top) {
			continue
		}
		servers, bounded := "", false
		ast.Inspect(s.syntax, func(node ast.Node) bool {
			switch n := node.(type) {
			case *ast.CompositeLit:
				made, _ := n.Type.(*ast.SelectorExpr)
				if made == nil || made.Sel.Name != "Server" {
					break
				}
				if from, _ := made.X.(*ast.Ident); from != nil && from.Name == "http" {
					servers = at(n)
				}
			case *ast.SelectorExpr:
				bounded = bounded || n.Sel.Name == "BodyWithin"
			}
			return true
		})
		if servers != "" && !bounded {
			t.Errorf("%s: no identity.BodyWithin here; net/http waits without end for what a handler leaves of a body", servers)
		}
	}
}

func TestTheProductListensOnTCPThroughIdentityAlone(t *testing.T) {
	t.Parallel()
	for _, s := range goFiles(t) {
		top, _, _ := strings.Cut(s.name, "/")
		if s.test() || top == "test" || top == "tools" || s.name == "identity/server.go" {
			continue
		}
		complain := func(node ast.Node) {
			t.Errorf("%s: use identity.ListenTCP; other listeners speak MPTCP, where options and marks of a socket do not reach its bytes", at(node))
		}
		calls(s, "net", "ListenTCP", func(call *ast.CallExpr) { complain(call) })
		configures := false // a net.ListenConfig, perhaps under another name
		ast.Inspect(s.syntax, func(node ast.Node) bool {
			selector, _ := node.(*ast.SelectorExpr)
			configures = configures || selector != nil && selector.Sel.Name == "ListenConfig"
			return true
		})
		ast.Inspect(s.syntax, func(node ast.Node) bool {
			call, ok := node.(*ast.CallExpr)
			if !ok {
				return true
			}
			selector, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			base, _ := selector.X.(*ast.Ident)
			unix := slices.ContainsFunc(call.Args, func(arg ast.Expr) bool {
				literal, ok := arg.(*ast.BasicLit)
				return ok && literal.Value == `"unix"`
			})
			switch name := selector.Sel.Name; {
			case strings.HasPrefix(name, "ListenAndServe"):
				complain(call)
			case name == "Listen" && !unix && (configures || base != nil && (base.Name == "net" || base.Name == "tls")):
				complain(call)
			}
			return true
		})
	}
}
