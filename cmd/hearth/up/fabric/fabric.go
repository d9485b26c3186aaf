// Package fabric runs a whole Hearth fabric on one machine: a hub origin, the
// agents of several nodes, engines and the router, each as a process of its
// own made by running this program again. `hearth up` and its check call it.
// It decides nothing that an agent or the router decides; what it knows of
// them it reads from their admin interfaces and the engines' own counters.
package fabric
