package kernels

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Machine is one boot of a kernel.
type Machine struct {
	QEMU      string // program
	Kernel    string // file
	Initramfs string // file
	Out       string // folder for console.log, SUITE.log and SUITE/, the files that tests left
	// Parameters are further ones of the kernel.
	Parameters string
}

// ConsoleName is the file in Out with all that the kernel and process 1 say,
// and what QEMU says at the end.
const ConsoleName = "console.log"

// arguments of QEMU: 1 GiB of memory, two processors, no devices but serial
// ports. A kernel that panics ends it. A busy machine holds its processors up for
// long; the kernel shall not blame the clock for that. Both processors take turns
// in one thread: in two, one may run what was translated before the other patched
// the kernel's code, and dies of a breakpoint that is no longer there.
func (m Machine) arguments() []string {
	return []string{
		"-machine", "q35", "-accel", "tcg,thread=single", "-cpu", "max", "-smp", "2", "-m", "1024",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-serial", "file:" + filepath.Join(m.Out, ConsoleName), "-serial", "stdio",
		"-kernel", m.Kernel, "-initrd", m.Initramfs,
		"-append", "console=ttyS0 panic=-1 oops=panic rdinit=/init mitigations=off random.trust_cpu=on tsc=reliable " + m.Parameters,
	}
}

// Boot runs the machine until it is off or ctx ends, and gives what it told. The
// error says why it did not run its plan to the end; what came before stands in
// the result all the same.
func (m Machine) Boot(ctx context.Context) (Result, error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	result := Result{Suites: map[string]*Outcome{}}
	// Other work on this machine goes first: none here depends on speed.
	command := exec.CommandContext(ctx, "nice", append([]string{"-n", "15", m.QEMU}, m.arguments()...)...)
	command.WaitDelay = 10 * time.Second
	var complaints strings.Builder
	command.Stderr = &complaints
	records, err := command.StdoutPipe()
	if err != nil {
		return result, fmt.Errorf("start QEMU: %w", err)
	}
	began := time.Now()
	if err := command.Start(); err != nil {
		return result, fmt.Errorf("start QEMU: %w", err)
	}
	readErr := m.read(records, began, &result)
	if readErr != nil {
		stop()
	}
	waitErr := command.Wait()
	result.Total = time.Since(began).Seconds()
	if complaints.Len() > 0 {
		if err := appendTo(filepath.Join(m.Out, ConsoleName), "\nQEMU says:\n"+complaints.String()); err != nil {
			return result, err
		}
	}
	switch {
	case result.done:
		return result, nil
	case result.broken != "":
		return result, fmt.Errorf("run plan in the machine: %s", result.broken)
	case readErr != nil:
		return result, readErr
	case ctx.Err() != nil:
		return result, fmt.Errorf("wait for the machine: %w", context.Cause(ctx))
	case result.Release == "":
		return result, fmt.Errorf("boot kernel: the machine ended before process 1 could tell (QEMU: %w)", orNone(waitErr))
	}
	return result, fmt.Errorf("run plan in the machine: it ended early (QEMU: %w)", orNone(waitErr))
}

var errNone = errors.New("no error")

func orNone(err error) error {
	if err == nil {
		return errNone
	}
	return err
}

// read takes the machine's records as they come, until its port closes.
func (m Machine) read(records io.Reader, began time.Time, result *Result) error {
	lines := bufio.NewReader(records)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			return nil //nolint:nilerr // the machine is off; whether it told all is seen from what it told
		}
		var record Record
		if json.Unmarshal([]byte(line), &record) != nil {
			// Firmware may write to any port.
			if err := appendTo(filepath.Join(m.Out, ConsoleName), line); err != nil {
				return err
			}
			continue
		}
		if record.Kind == KindBooted {
			result.BootedIn = time.Since(began).Seconds()
		}
		if err := m.keep(record); err != nil {
			return err
		}
		result.Add(record)
	}
}

// keep writes what a record holds for a person into Out.
func (m Machine) keep(record Record) error {
	switch record.Kind {
	case KindLine:
		return appendTo(filepath.Join(m.Out, record.Suite+".log"), record.Text+"\n")
	case KindFile:
		if !filepath.IsLocal(record.Path) {
			return fmt.Errorf("keep file of suite %s: %q leads out of its folder", record.Suite, record.Path)
		}
		name := filepath.Join(m.Out, record.Suite, record.Path)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return fmt.Errorf("keep file of suite %s: %w", record.Suite, err)
		}
		if err := os.WriteFile(name, record.Data, 0o644); err != nil {
			return fmt.Errorf("keep file of suite %s: %w", record.Suite, err)
		}
	}
	return nil
}

func appendTo(name, text string) error {
	file, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("keep output: %w", err)
	}
	_, err = file.WriteString(text)
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("keep output: %w", err)
	}
	return nil
}
