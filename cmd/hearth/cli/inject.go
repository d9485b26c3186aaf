package cli

import (
	"context"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/nodeagent/admin"
)

func (a *app) inject() *cobra.Command {
	command := &cobra.Command{
		Use:   "inject",
		Short: "Report a fault of a device that has none, to see what happens",
	}
	command.AddCommand(a.injectXID(), a.injectClear())
	return command
}

func (a *app) injectXID() *cobra.Command {
	var id string
	command := &cobra.Command{
		Use:   "xid CODE --device ID",
		Short: "Report an XID, as the NVIDIA driver would",
		Args:  cobra.ExactArgs(1),
		RunE: func(command *cobra.Command, args []string) error {
			const highest = 1023
			code, err := strconv.Atoi(args[0])
			if err != nil || code < 1 || code > highest {
				return terminal.Usagef("%q is no XID; want a number from 1 to %d, such as 79", args[0], highest)
			}
			return a.injectInto(command.Context(), admin.InjectRequest{Device: id, XID: code})
		},
	}
	return a.injectFlags(command, &id)
}

func (a *app) injectClear() *cobra.Command {
	var id string
	command := &cobra.Command{
		Use:   "clear --device ID",
		Short: "Take every injected fault of a device back",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			return a.injectInto(command.Context(), admin.InjectRequest{Device: id, Clear: true})
		},
	}
	return a.injectFlags(command, &id)
}

func (a *app) injectFlags(command *cobra.Command, id *string) *cobra.Command {
	command.Flags().StringVar(id, "device", "", "device id, as 'hearth nodes' shows it (required)")
	_ = command.MarkFlagRequired("device") // the flag exists
	return a.jsonFlag(a.nodeFlag(a.addrFlags(command, "agent", envAgent)))
}

func (a *app) injectInto(ctx context.Context, request admin.InjectRequest) error {
	p, err := a.agent(ctx, true)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	device, err := onAgent(ctx, p, func(ctx context.Context, c *admin.Client) (admin.Device, error) { return c.Inject(ctx, request) })
	if err != nil {
		return err
	}
	if a.json {
		return terminal.JSON(a.Out, device)
	}
	return terminal.Table(a.Out, []string{"DEVICE", "PRODUCT", "HEALTH", "CONDITIONS"},
		[][]string{{device.ID, device.Product, device.Health, conditions(device)}})
}
