import { render } from 'preact';
import * as clock from './state/clock';
import * as keys from './state/keys';
import * as live from './state/live';
import * as route from './state/route';
import './styles/base.css';
import './styles/list.css';
import './styles/drawer.css';
import './styles/pages.css';
import { App } from './ui/app';

clock.start();
route.listen();
keys.listen();
live.listen();
void live.start();
render(<App />, document.getElementById('app')!);
