// The hub client of Docker's model runner, apart from Hearth's module: it needs
// a newer Go and brings modules that Hearth has no use for.
module github.com/hearth-dev/hearth/test/outside/testdata/model_runner

go 1.26.10

toolchain go1.27.3

require github.com/docker/model-runner v1.2.9

require (
	github.com/docker/go-units v0.5.0 // indirect
	github.com/gpustack/gguf-parser-go v0.24.0 // indirect
	github.com/henvic/httpretty v0.1.4 // indirect
	github.com/json-iterator/go v1.1.12 // indirect
	github.com/modelpack/model-spec v0.0.7 // indirect
	github.com/modern-go/concurrent v0.0.0-20180306012644-bacd9c7ef1dd // indirect
	github.com/modern-go/reflect2 v1.0.3-0.20250322232337-35a7c28c31ee // indirect
	github.com/opencontainers/go-digest v1.0.0 // indirect
	github.com/smallnest/ringbuffer v0.0.0-20241116012123-461381446e3d // indirect
	golang.org/x/crypto v0.55.0 // indirect
	golang.org/x/exp v0.0.0-20250106191152-7588d65b2ba8 // indirect
	golang.org/x/mod v0.38.0 // indirect
	golang.org/x/sync v0.22.0 // indirect
	golang.org/x/sys v0.47.0 // indirect
	golang.org/x/tools v0.48.0 // indirect
	gonum.org/v1/gonum v0.17.0 // indirect
)
