package tidy

import (
	"go/ast"
	"go/token"
	"path"
	"slices"
	"testing"
	"unicode"
)

func TestFoldersAreNamedForWhatTheyHold(t *testing.T) {
	t.Parallel()
	vague := []string{"pkg", "internal", "util", "utils", "common", "types", "helper", "helpers", "misc", "shared", "lib", "base"}
	seen := map[string]bool{}
	for _, s := range allFiles(t) {
		for dir := s.dir(); dir != "." && !seen[dir]; dir = path.Dir(dir) {
			seen[dir] = true
			if slices.Contains(vague, path.Base(dir)) {
				t.Errorf("folder %s: the name says nothing about what it holds", dir)
			}
		}
	}
}

// never holds words that the glossary replaces, with the word to use.
var never = map[string]string{
	"Host": "node", "Worker": "node", "Backend": "source, engine or endpoint", "Upstream": "source or engine",
	"Replica": "endpoint", "Heartbeat": "report", "Cordon": "drain", "Quota": "budget", "Notification": "event",
	"Message": "event", "Alert": "condition", "Layer": "tier", "Level": "tier", "Part": "chunk", "Page": "block",
	"Util": "a name for what it does", "Helper": "a name for what it does", "Manager": "a name for what it does",
}

// neverExcept allows a name, with the reason.
var neverExcept = map[string]string{
	"test/sim/engine.Message": "a chat message, as the OpenAI API calls it",
}

func TestExportedTypesUseTheGlossary(t *testing.T) {
	t.Parallel()
	for _, s := range goFiles(t) {
		if s.test() || s.generated() {
			continue
		}
		for _, decl := range s.syntax.Decls {
			types, ok := decl.(*ast.GenDecl)
			if !ok || types.Tok != token.TYPE {
				continue
			}
			for _, spec := range types.Specs {
				name := spec.(*ast.TypeSpec).Name
				if !name.IsExported() || neverExcept[s.dir()+"."+name.Name] != "" {
					continue
				}
				for _, word := range words(name.Name) {
					if use, bad := never[word]; bad {
						t.Errorf("%s: type %s: the glossary says %s, never %s", at(name), name.Name, use, word)
					}
				}
			}
		}
	}
}

// words splits a CamelCase name: "HTTPHost" is HTTP and Host.
func words(name string) []string {
	var found []string
	start := 0
	runes := []rune(name)
	for i := 1; i < len(runes); i++ {
		afterLower := unicode.IsUpper(runes[i]) && !unicode.IsUpper(runes[i-1])
		beforeLower := unicode.IsUpper(runes[i]) && i+1 < len(runes) && unicode.IsLower(runes[i+1])
		if afterLower || beforeLower {
			found = append(found, string(runes[start:i]))
			start = i
		}
	}
	return append(found, string(runes[start:]))
}

func TestExportedNamesAndPackagesAreDocumented(t *testing.T) {
	t.Parallel()
	packages := map[string]bool{}
	for _, s := range goFiles(t) {
		if s.test() {
			continue
		}
		packages[s.dir()] = packages[s.dir()] || s.syntax.Doc != nil
		if s.generated() {
			continue
		}
		for _, decl := range s.syntax.Decls {
			for _, name := range undocumented(decl) {
				t.Errorf("%s: exported %s has no comment", at(name), name.Name)
			}
		}
	}
	for dir, documented := range packages {
		if !documented {
			t.Errorf("package %s: no comment says what it owns, who calls it and what it never does", dir)
		}
	}
}

// undocumented gives the exported names of a declaration that no comment covers.
func undocumented(decl ast.Decl) []*ast.Ident {
	switch decl := decl.(type) {
	case *ast.FuncDecl:
		if decl.Doc != nil || !decl.Name.IsExported() || decl.Recv != nil && !exportedReceiver(decl.Recv) {
			return nil
		}
		return []*ast.Ident{decl.Name}
	case *ast.GenDecl:
		var missing []*ast.Ident
		for _, spec := range decl.Specs {
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				if spec.Name.IsExported() && spec.Doc == nil && decl.Doc == nil {
					missing = append(missing, spec.Name)
				}
			case *ast.ValueSpec:
				for _, name := range spec.Names {
					if name.IsExported() && spec.Doc == nil && spec.Comment == nil && decl.Doc == nil {
						missing = append(missing, name)
					}
				}
			}
		}
		return missing
	}
	return nil
}

func exportedReceiver(receiver *ast.FieldList) bool {
	kind := receiver.List[0].Type
	if star, ok := kind.(*ast.StarExpr); ok {
		kind = star.X
	}
	if index, ok := kind.(*ast.IndexExpr); ok {
		kind = index.X
	}
	name, ok := kind.(*ast.Ident)
	return ok && name.IsExported()
}
