package weightcache

import (
	"fmt"
	"path/filepath"
	"slices"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// The store's chunks directory is the one home of chunk lists: they follow from
// a file's bytes, so every artifact with the file shares them, and a list that
// is lost is made again by the next check of the file.

// Chunks gives the chunk list of a committed file, see artifact.Chunker. Errors
// wrap ErrNotReady where the file is not in the store, fs.ErrNotExist where its
// list was lost, and artifact.ErrInvalid where that is damaged.
func (s *Store) Chunks(sha artifact.Digest) ([]artifact.Digest, error) {
	s.mu.Lock()
	size, found := s.blobs[sha]
	s.mu.Unlock()
	if !found {
		return nil, fmt.Errorf("read chunks of file %s: %w", sha.Short(), ErrNotReady)
	}
	count := artifact.ChunkCount(size)
	if count == 1 {
		return []artifact.Digest{sha}, nil
	}
	data, err := durable.ReadFile(s.fs, s.chunksPath(sha), int64(count*len(sha)))
	if err != nil {
		return nil, fmt.Errorf("read chunks of file %s: %w", sha.Short(), err)
	}
	return decodeChunks(data, sha, count)
}

// decodeChunks reads a chunk list of so many entries. Errors wrap
// artifact.ErrInvalid.
func decodeChunks(data []byte, sha artifact.Digest, count int) ([]artifact.Digest, error) {
	if count < 1 || len(data) != count*len(sha) || artifact.Digest(data[len(data)-len(sha):]) != sha {
		return nil, fmt.Errorf("read chunks of file %s: %w: %d bytes", sha.Short(), artifact.ErrInvalid, len(data))
	}
	chunks := make([]artifact.Digest, 0, count)
	for part := range slices.Chunk(data, len(sha)) {
		chunks = append(chunks, artifact.Digest(part))
	}
	return chunks, nil
}

// writeChunks keeps the chunk list of a file; the list of one chunk is the
// file's digest and needs no file.
func (s *Store) writeChunks(sha artifact.Digest, chunks []artifact.Digest) error {
	if len(chunks) < 2 {
		return nil
	}
	data := make([]byte, 0, len(chunks)*len(sha))
	for _, c := range chunks {
		data = append(data, c[:]...)
	}
	path := s.chunksPath(sha)
	if err := durable.MkdirAllSynced(s.fs, filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return durable.WriteFile(s.fs, path, data, 0o600)
}

// mendChunks writes the chunk list of a file that was just read whole, unless
// that is what is there.
func (s *Store) mendChunks(sha artifact.Digest, chunks []artifact.Digest) error {
	if kept, err := s.Chunks(sha); err == nil && slices.Equal(kept, chunks) {
		return nil
	}
	if err := s.writeChunks(sha, chunks); err != nil {
		return fmt.Errorf("write chunks of file %s: %w", sha.Short(), err)
	}
	return nil
}
