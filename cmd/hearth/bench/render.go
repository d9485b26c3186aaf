package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"html"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

const (
	markBegin = "<!-- bench:begin -->"
	markEnd   = "<!-- bench:end -->"
)

// renderCommand is the hidden `hearth bench render`: it writes the performance section
// of a page and its plots from the JSON files of earlier benches.
func renderCommand() *cobra.Command {
	var page, by string
	cmd := &cobra.Command{
		Use: "render FILE...", Hidden: true, Args: cobra.MinimumNArgs(1),
		Short: "Write the performance section of a page from bench JSON",
		RunE: func(_ *cobra.Command, files []string) error {
			var section bytes.Buffer
			for i, file := range files {
				report, err := readReport(file)
				if err != nil {
					return err
				}
				plot := strings.TrimSuffix(file, filepath.Ext(file)) + ".svg"
				if err := os.WriteFile(plot, svg(report), 0o644); err != nil {
					return fmt.Errorf("write plot: %w", err)
				}
				rel, err := filepath.Rel(filepath.Dir(page), plot)
				if err != nil {
					rel = plot
				}
				if i == 0 {
					origin(&section, report, by)
				}
				markdown(&section, report, filepath.ToSlash(rel))
			}
			return replaceSection(page, section.Bytes())
		},
	}
	cmd.Flags().StringVar(&page, "page", "README.md", "page whose section is replaced")
	cmd.Flags().StringVar(&by, "by", "make bench", "command that the page names as its writer")
	return cmd
}

func readReport(path string) (Report, error) {
	var r Report
	data, err := os.ReadFile(path)
	if err != nil {
		return r, fmt.Errorf("read bench: %w", err)
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("read bench %s: %w", path, err)
	}
	if r.Schema != Schema {
		return r, fmt.Errorf("read bench %s: schema %q, want %q", path, r.Schema, Schema)
	}
	return r, nil
}

func replaceSection(page string, section []byte) error {
	text, err := os.ReadFile(page)
	if err != nil {
		return fmt.Errorf("read page: %w", err)
	}
	head, rest, found := bytes.Cut(text, []byte(markBegin))
	_, tail, closed := bytes.Cut(rest, []byte(markEnd))
	if !found || !closed {
		return fmt.Errorf("find section in %s: want %s and %s", page, markBegin, markEnd)
	}
	out := bytes.Join([][]byte{head, []byte(markBegin), []byte("\n"), section, []byte(markEnd), tail}, nil)
	if err := os.WriteFile(page, out, 0o644); err != nil {
		return fmt.Errorf("write page: %w", err)
	}
	return nil
}

// origin says what wrote a page, and on which machine.
func origin(w *bytes.Buffer, r Report, by string) {
	_, _ = fmt.Fprintf(w, "Written by `%s` on %s, %d cores, %.0f GiB, kernel %s, %s, %s.\n",
		by, r.Machine.CPU, r.Machine.Cores, float64(r.Machine.MemoryBytes)/(1<<30), r.Machine.Kernel, r.Machine.Go, r.Machine.Disk)
	_, _ = fmt.Fprintln(w, "Each figure is the median of interleaved pairs with its reference in one run; a ratio above 1 is better than the reference.")
}

// markdown writes a bench: a line of how it went, and folded behind it plot and rows.
func markdown(w *bytes.Buffer, r Report, plot string) {
	aims, met := 0, 0
	for _, row := range r.Rows {
		if row.Aim == 0 {
			continue
		}
		if aims++; row.Met {
			met++
		}
	}
	_, _ = fmt.Fprintf(w, "\n<details><summary><code>hearth bench %s</code> at commit %.12s: %d rows, %d of %d aims met</summary>\n\n![%s](%s)\n\n",
		html.EscapeString(r.Bench), r.Commit, len(r.Rows), met, aims, r.Bench, plot)
	_, _ = fmt.Fprintln(w, "| row | value | unit | reference | ratio | aim | met | what |\n|---|---|---|---|---|---|---|---|")
	for _, row := range r.Rows {
		ref, ratio, aim := "-", "-", "-"
		if len(row.References) > 0 {
			ref = fmt.Sprintf("%s: %s", row.References[0].Name, figure(row.References[0].Value))
			ratio = fmt.Sprintf("%.2f", ratioOf(row))
		}
		if row.Aim != 0 {
			aim = figure(row.Aim)
		}
		met := "yes"
		if !row.Met {
			met = "**no**"
		}
		_, _ = fmt.Fprintf(w, "| %s | %s | %s | %s | %s | %s | %s | %s |\n", row.Name, figure(row.Value), row.Unit, ref, ratio, aim, met, row.Note)
	}
	further(w, r)
	_, _ = fmt.Fprintln(w, "\n</details>")
}

// further writes what rows were held against beside their first reference.
func further(w *bytes.Buffer, r Report) {
	if !slices.ContainsFunc(r.Rows, func(row Row) bool { return len(furtherOf(row)) > 0 }) {
		return
	}
	_, _ = fmt.Fprintln(w, "\nFurther references of the same run:\n\n| row | reference | its value | unit | ratio |\n|---|---|---|---|---|")
	for _, row := range r.Rows {
		for _, ref := range furtherOf(row) {
			_, _ = fmt.Fprintf(w, "| %s | %s | %s | %s | %.2f |\n", row.Name, ref.Name, figure(ref.Value), row.Unit, ref.Ratio)
		}
	}
}

func figure(v float64) string {
	switch {
	case v >= 1e9:
		return fmt.Sprintf("%.2f G", v/1e9)
	case v >= 1e6:
		return fmt.Sprintf("%.1f M", v/1e6)
	}
	if v >= 100 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}

// svg draws one bar per row that has a reference: its ratio, with lines at the
// reference (1) and the row's aim.
func svg(r Report) []byte {
	const (
		left, bar, gap = 190.0, 16.0, 10.0
		unit           = 180.0 // pixels per ratio of 1
		width          = 720.0
	)
	var rows []Row
	for _, row := range r.Rows {
		if len(row.References) > 0 {
			rows = append(rows, row)
		}
	}
	height := 50 + float64(len(rows))*(bar+gap)
	var b bytes.Buffer
	_, _ = fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" font-family="sans-serif" font-size="12">`+"\n", width, height)
	_, _ = fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="white"/><text x="8" y="18">hearth bench %s: ratio to the reference (dashed), more is better; the tick is the aim</text>`+"\n", html.EscapeString(r.Bench))
	for i, row := range rows {
		y := 32 + float64(i)*(bar+gap)
		ratio := ratioOf(row)
		length := min(ratio*unit, width-left-60)
		color := "#2a7"
		if !row.Met {
			color = "#c52"
		}
		_, _ = fmt.Fprintf(&b, `<text x="%.0f" y="%.1f" text-anchor="end">%s</text><rect x="%.0f" y="%.1f" width="%.1f" height="%.0f" fill="%s"/><text x="%.1f" y="%.1f">%.2f</text>`+"\n",
			left-8, y+12, html.EscapeString(row.Name), left, y, length, bar, color, left+length+6, y+12, ratio)
		if row.Ratio != 0 && row.Aim != 0 {
			_, _ = fmt.Fprintf(&b, `<line x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f" stroke="black" stroke-width="2"/>`+"\n", left+row.Aim*unit, left+row.Aim*unit, y-2, y+bar+2)
		}
	}
	_, _ = fmt.Fprintf(&b, `<line x1="%.1f" x2="%.1f" y1="26" y2="%.1f" stroke="#555" stroke-dasharray="4 3"/>`+"\n</svg>\n", left+unit, left+unit, height-10)
	return b.Bytes()
}
