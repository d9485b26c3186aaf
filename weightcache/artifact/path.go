package artifact

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode/utf8"
)

// Limits on what an artifact may claim. A listing or manifest past one of
// them is refused with ErrInvalid before anything is written.
const (
	// MaxFiles is the most files of one artifact.
	MaxFiles = 100_000
	// MaxPathBytes is the longest path of a file in bytes.
	MaxPathBytes = 1024
	// MaxSegmentBytes is the longest name between slashes in bytes; file
	// systems stop at 255.
	MaxSegmentBytes = 255
	// MaxFileSize is the longest file in bytes: 4 TiB.
	MaxFileSize = 4 << 40
	// MaxTotalSize is the most bytes of all files: 64 TiB.
	MaxTotalSize = 64 << 40
	// MaxValidatorBytes is the longest validator of a file in bytes.
	MaxValidatorBytes = 1024
)

// ValidPath accepts a relative, clean, slash separated path of valid UTF-8
// without "..", control characters or backslashes. Errors wrap ErrInvalid.
func ValidPath(p string) error {
	switch {
	case p == "":
		return fmt.Errorf("check path: %w: empty", ErrInvalid)
	case len(p) > MaxPathBytes:
		return fmt.Errorf("check path %.40q...: %w: longer than %d bytes", p, ErrInvalid, MaxPathBytes)
	case !utf8.ValidString(p):
		return fmt.Errorf("check path %q: %w: not UTF-8", p, ErrInvalid)
	case p[0] == '/':
		return fmt.Errorf("check path %q: %w: absolute", p, ErrInvalid)
	case path.Clean(p) != p || p == ".":
		return fmt.Errorf("check path %q: %w: not a clean relative path", p, ErrInvalid)
	}
	for _, c := range []byte(p) {
		if c < 0x20 || c == 0x7f || c == '\\' {
			return fmt.Errorf("check path %q: %w: control character or backslash", p, ErrInvalid)
		}
	}
	for segment := range strings.SplitSeq(p, "/") {
		if segment == ".." {
			return fmt.Errorf("check path %q: %w: leaves the artifact", p, ErrInvalid)
		}
		if len(segment) > MaxSegmentBytes {
			return fmt.Errorf("check path %q: %w: a name is longer than %d bytes", p, ErrInvalid, MaxSegmentBytes)
		}
	}
	return nil
}

// kinds are the files that hold tensors and those that an engine reads before
// it loads them, by the end of their name.
var kinds = func() map[string]Kind {
	m := map[string]Kind{}
	for _, end := range []string{
		".safetensors", ".gguf", ".ggml", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5",
		".onnx", ".onnx_data", ".npz", ".engine", ".plan", ".tflite", ".llamafile", ".nemo",
	} {
		m[end] = Weights
	}
	for _, end := range []string{".json", ".txt", ".model", ".jinja", ".tiktoken", ".yaml", ".yml", ".py", ".vocab", ".jsonl", ".toml", ".spm"} {
		m[end] = Metadata
	}
	return m
}()

// KindOf derives the kind of a file from its path: tensors by the end of the
// name, then what engines read before them, then everything else.
func KindOf(p string) Kind {
	base := strings.ToLower(p[strings.LastIndexByte(p, '/')+1:])
	switch base {
	case "license.txt", "notice.txt", "use_policy.txt", "training_args.bin", "optimizer.bin":
		return Other
	}
	if kind, known := kinds[path.Ext(base)]; known {
		return kind
	}
	return Other
}

// CheckFiles validates the files of a listing or manifest: paths, sizes,
// counts, order, and that no path is used twice or as both file and
// directory. A listing may leave SHA256 zero where GitSHA1 is given, a
// manifest may not. Errors wrap ErrInvalid and name the path.
func CheckFiles(files []File, needSHA256 bool) error {
	if len(files) == 0 {
		return fmt.Errorf("check files: %w: no file", ErrInvalid)
	}
	if len(files) > MaxFiles {
		return fmt.Errorf("check files: %w: %d files, at most %d are allowed", ErrInvalid, len(files), MaxFiles)
	}
	var total int64
	for i, f := range files {
		if err := ValidPath(f.Path); err != nil {
			return err
		}
		if f.Size < 0 || f.Size > MaxFileSize {
			return fmt.Errorf("check file %q: %w: size %d bytes is outside 0 to %d", f.Path, ErrInvalid, f.Size, int64(MaxFileSize))
		}
		total += f.Size
		if total > MaxTotalSize {
			return fmt.Errorf("check file %q: %w: the artifact is larger than %d bytes", f.Path, ErrInvalid, int64(MaxTotalSize))
		}
		if f.SHA256.IsZero() && (needSHA256 || f.GitSHA1 == "") {
			return fmt.Errorf("check file %q: %w: no digest", f.Path, ErrInvalid)
		}
		if f.GitSHA1 != "" && !isHex(f.GitSHA1, 40) {
			return fmt.Errorf("check file %q: %w: git id %.60q is not 40 lower-case hex digits", f.Path, ErrInvalid, f.GitSHA1)
		}
		if len(f.Validator) > MaxValidatorBytes {
			return fmt.Errorf("check file %q: %w: validator longer than %d bytes", f.Path, ErrInvalid, MaxValidatorBytes)
		}
		if i > 0 && files[i-1].Path >= f.Path {
			if files[i-1].Path == f.Path {
				return fmt.Errorf("check file %q: %w: named twice", f.Path, ErrInvalid)
			}
			return fmt.Errorf("check file %q: %w: not sorted by path", f.Path, ErrInvalid)
		}
	}
	return checkFolders(files)
}

// checkFolders finds a file of sorted ones that lies below another.
func checkFolders(files []File) error {
	last := ""
	for _, f := range files {
		for at, c := range []byte(f.Path) {
			// The folders it shares with the one before were looked at there.
			if c != '/' || at < len(last) && last[at] == '/' && last[:at] == f.Path[:at] {
				continue
			}
			if _, found := slices.BinarySearchFunc(files, f.Path[:at], func(f File, dir string) int { return strings.Compare(f.Path, dir) }); found {
				return fmt.Errorf("check file %q: %w: %q is both a file and a directory", f.Path, ErrInvalid, f.Path[:at])
			}
		}
		last = f.Path
	}
	return nil
}

func isHex(s string, n int) bool {
	if len(s) != n {
		return false
	}
	for _, c := range s {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
