// Package tidy holds the house rules that a machine can check and a linter does
// not: the import law with its exact allowances, names, documentation, and that
// what the pages promise exists. It reads the checkout it stands in, starts no
// process and needs no network.
package tidy

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
)

const (
	module = "github.com/hearth-dev/hearth"
	root   = "../.."
)

// source is one file of the tree; syntax is set for Go.
type source struct {
	name   string // slash path from the root
	text   []byte
	syntax *ast.File
}

func (s *source) dir() string     { return path.Dir(s.name) }
func (s *source) test() bool      { return strings.HasSuffix(s.name, "_test.go") }
func (s *source) generated() bool { return s.syntax != nil && ast.IsGenerated(s.syntax) }

// imports gives the import paths of a Go file.
func (s *source) imports() []string {
	var paths []string
	for _, spec := range s.syntax.Imports {
		if text, err := strconv.Unquote(spec.Path.Value); err == nil {
			paths = append(paths, text)
		}
	}
	return paths
}

var fset = token.NewFileSet()

// tree reads the checkout once: every text file but testdata and what git does
// not keep.
var tree = sync.OnceValues(func() ([]*source, error) {
	const maxSize = 4 << 20
	var files []*source
	err := filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		name = filepath.ToSlash(name)
		if entry.IsDir() {
			switch entry.Name() {
			case ".git", ".cache", "bin", "testdata", "node_modules", "__pycache__":
				return filepath.SkipDir
			}
			return nil
		}
		info, err := entry.Info()
		if err != nil || !info.Mode().IsRegular() || info.Size() > maxSize {
			return err
		}
		text, err := os.ReadFile(file)
		if err != nil || bytes.IndexByte(text, 0) >= 0 {
			return err
		}
		s := &source{name: name, text: text}
		if strings.HasSuffix(name, ".go") && !strings.HasPrefix(name, "tools/") {
			if s.syntax, err = parser.ParseFile(fset, name, text, parser.ParseComments|parser.SkipObjectResolution); err != nil {
				return err
			}
		}
		files = append(files, s)
		return nil
	})
	return files, err
})

func allFiles(t *testing.T) []*source {
	t.Helper()
	files, err := tree()
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func goFiles(t *testing.T) []*source {
	t.Helper()
	var found []*source
	for _, s := range allFiles(t) {
		if s.syntax != nil {
			found = append(found, s)
		}
	}
	return found
}

// rootModule reports whether a file belongs to the module of the root, and not
// to one with a go.mod of its own below it.
func (s *source) rootModule() bool {
	for dir := s.dir(); dir != "."; dir = path.Dir(dir) {
		if _, err := os.Stat(filepath.Join(root, dir, "go.mod")); err == nil {
			return false
		}
	}
	return true
}

// page gives the text of one file of the root.
func page(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// at gives a position for an error.
func at(node ast.Node) string { return fset.Position(node.Pos()).String() }

// calls visits every call of pkg.name, by the name the file imports pkg under.
func calls(s *source, pkg, name string, visit func(*ast.CallExpr)) {
	local := ""
	for _, spec := range s.syntax.Imports {
		if strings.Trim(spec.Path.Value, `"`) == pkg {
			local = path.Base(pkg)
			if spec.Name != nil {
				local = spec.Name.Name
			}
		}
	}
	if local == "" {
		return
	}
	ast.Inspect(s.syntax, func(node ast.Node) bool {
		call, ok := node.(*ast.CallExpr)
		if !ok {
			return true
		}
		if selector, ok := call.Fun.(*ast.SelectorExpr); ok && selector.Sel.Name == name {
			if base, ok := selector.X.(*ast.Ident); ok && base.Name == local {
				visit(call)
			}
		}
		return true
	})
}
