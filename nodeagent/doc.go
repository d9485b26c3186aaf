// Package nodeagent is the program of one node: it reads a Config, builds the
// roles asked for (weights and mirror; endpoints, health and report), serves
// their listeners and owns every goroutine under one error group. Only cmd
// calls it. It decides nothing that its rooms decide, and never exits the process.
package nodeagent
