package ledger

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Version of the format that is written. CLAIMS.md describes it.
const Version = 1

// magic opens every record.
const magic = "hearth-claim"

// maxHeader bounds the first line of a record, in bytes.
const maxHeader = 128

// errBad says that a file is damaged: no crash leaves it so.
var errBad = errors.New("does not check")

// header is the first line of a record without its checksum.
func header(version, length int) string {
	return magic + " " + strconv.Itoa(version) + " " + strconv.Itoa(length)
}

// sum covers the header's text, a line feed and the body.
func sum(head string, body []byte) string {
	h := sha256.New()
	_, _ = io.WriteString(h, head+"\n")
	_, _ = h.Write(body)
	return hex.EncodeToString(h.Sum(nil))
}

// encode gives the record of an entry.
func encode(e *Entry) ([]byte, error) {
	body, err := json.Marshal(e)
	if err != nil {
		return nil, fmt.Errorf("encode entry: %w", err)
	}
	body = append(body, '\n')
	head := header(Version, len(body))
	record := append([]byte(head+" sha256:"+sum(head, body)+"\n"), body...)
	if len(record) > maxRecord {
		return nil, fmt.Errorf("encode entry: %d bytes, at most %d", len(record), maxRecord)
	}
	return record, nil
}

// decoded is what a file's bytes say.
type decoded struct {
	entry Entry // of the last whole record
	whole int   // bytes of whole records; what follows is a torn append
}

// decode reads the records of a file. The last whole record counts. What
// follows it may be an append that a crash tore: cut short, or with sectors
// that never reached the drive and read as zeroes, which no record contains.
// Everything else is errBad, or ErrNewer where a record of a newer version
// checks.
func decode(data []byte) (decoded, error) {
	var d decoded
	records := 0
	for rest := data; len(rest) > 0; rest = data[d.whole:] {
		body, length, err := next(rest)
		switch {
		case errors.Is(err, ErrNewer):
			return d, err
		case err != nil && records > 0 && torn(rest):
			return d, nil
		case err != nil:
			return d, err
		}
		entry, err := decodeEntry(body)
		if err != nil {
			return d, err
		}
		if records > 0 && entry.UID != d.entry.UID {
			return d, fmt.Errorf("%w: records of claims %s and %s in one file", errBad, d.entry.UID, entry.UID)
		}
		d.entry, d.whole = entry, d.whole+length
		records++
	}
	if records == 0 {
		return d, fmt.Errorf("%w: empty", errBad)
	}
	return d, nil
}

// next reads the first record of data: its body, and the bytes of both lines.
func next(data []byte) (body []byte, length int, err error) {
	line, _, found := bytes.Cut(data[:min(len(data), maxHeader)], []byte("\n"))
	if !found {
		return nil, 0, fmt.Errorf("%w: first line has no end", errBad)
	}
	head, sha, found := strings.Cut(string(line), " sha256:")
	fields := strings.Split(head, " ")
	if !found || len(fields) != 3 || fields[0] != magic {
		return nil, 0, fmt.Errorf("%w: first line is not a record's", errBad)
	}
	version, err1 := strconv.Atoi(fields[1])
	size, err2 := strconv.Atoi(fields[2])
	if err1 != nil || err2 != nil || version < 1 || size < 0 || size > maxRecord || head != header(version, size) {
		return nil, 0, fmt.Errorf("%w: first line is not a record's", errBad)
	}
	start := len(line) + 1
	if len(data)-start < size {
		return nil, 0, fmt.Errorf("%w: %d bytes of %d", errBad, len(data)-start, size)
	}
	body = data[start : start+size]
	if sum(head, body) != sha {
		return nil, 0, fmt.Errorf("%w: checksum differs", errBad)
	}
	if version > Version {
		return nil, 0, fmt.Errorf("%w: version %d, this program knows up to %d", ErrNewer, version, Version)
	}
	return body, start + size, nil
}

// torn reports whether bytes after a whole record can be an append that a
// crash interrupted. A whole record ends with the only line feed of its body.
func torn(rest []byte) bool {
	if bytes.IndexByte(rest, 0) >= 0 {
		return true
	}
	line, body, found := bytes.Cut(rest, []byte("\n"))
	if !found {
		return len(rest) < maxHeader && bytes.HasPrefix([]byte(magic+" "), rest[:min(len(rest), len(magic)+1)])
	}
	head, sha, _ := strings.Cut(string(line), " sha256:")
	fields := strings.Split(head, " ")
	if len(fields) != 3 || len(sha) != 2*sha256.Size {
		return false
	}
	size, err := strconv.Atoi(fields[2])
	return err == nil && len(body) < size && !bytes.HasSuffix(body, []byte("\n"))
}

// decodeEntry reads a record's body strictly.
func decodeEntry(body []byte) (Entry, error) {
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.DisallowUnknownFields()
	var e Entry
	if err := decoder.Decode(&e); err != nil {
		return Entry{}, fmt.Errorf("%w: %w", errBad, err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return Entry{}, fmt.Errorf("%w: more than one object", errBad)
	}
	if err := e.check(); err != nil {
		return Entry{}, fmt.Errorf("%w: %w", errBad, err)
	}
	return e.clone(), nil
}
