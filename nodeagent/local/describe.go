package local

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Formats of artifacts.
const (
	formatSafetensors = "safetensors"
	formatGGUF        = "gguf"
)

const (
	configFile     = "config.json"
	maxConfigBytes = 4 << 20
	// maxHeaderBytes bounds how far into a GGUF file its type is looked for:
	// writers put it before the vocabulary.
	maxHeaderBytes = 1 << 20
	maxNameBytes   = 64 // of a quantization
)

// description is what an artifact says of itself.
type description struct {
	format, quantization string
}

// describe reads what the files of an artifact, which lie below flat, say of
// it. What they do not say stays empty; on an error too the answer counts.
func describe(m *artifact.Manifest, flat string) (description, error) {
	var d description
	gguf := ""
	config := false
	for _, f := range m.Files {
		switch {
		case f.Path == configFile:
			config = true
		case strings.HasSuffix(f.Path, ".safetensors"):
			d.format = formatSafetensors
		case strings.HasSuffix(f.Path, ".gguf") && gguf == "":
			gguf = f.Path
		}
	}
	if d.format == "" && gguf != "" {
		d.format = formatGGUF
		kind, err := ggufFileType(filepath.Join(flat, filepath.FromSlash(gguf)))
		d.quantization = kind
		return d, err
	}
	if !config {
		return d, nil
	}
	data, err := durable.ReadFile(durable.OS, filepath.Join(flat, configFile), maxConfigBytes)
	if err != nil {
		return d, err
	}
	d.quantization, err = quantizationOf(data)
	return d, err
}

// modelConfig is what is read of a config.json.
type modelConfig struct {
	Quantization struct {
		Method string `json:"quant_method"`
	} `json:"quantization_config"`
	TorchDtype string       `json:"torch_dtype"`
	Dtype      string       `json:"dtype"`
	Text       *modelConfig `json:"text_config"`
}

// quantizationOf is the method that a config.json names, or else the type of
// its tensors.
func quantizationOf(data []byte) (string, error) {
	var c modelConfig
	if err := json.Unmarshal(data, &c); err != nil {
		return "", fmt.Errorf("read %s: %w", configFile, err)
	}
	for each := &c; each != nil; each = each.Text {
		for _, name := range []string{each.Quantization.Method, each.TorchDtype, each.Dtype} {
			if name != "" && len(name) <= maxNameBytes {
				return strings.TrimPrefix(name, "torch."), nil
			}
		}
	}
	return "", nil
}

// ggufTypes are the names of general.file_type, as llama.cpp's llama.h has
// them (LLAMA_FTYPE).
var ggufTypes = map[uint32]string{
	0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
	13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
	21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
	29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}

// errGGUF says that a file is no GGUF file, or one whose header is odd.
var errGGUF = errors.New("not a GGUF header")

// ggufFileType is the type in a GGUF file's header; empty where it has none.
func ggufFileType(file string) (kind string, err error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	kind, err = readGGUF(bufio.NewReader(io.LimitReader(f, maxHeaderBytes)))
	if err != nil {
		return "", fmt.Errorf("read %s: %w", filepath.Base(file), err)
	}
	return kind, nil
}
